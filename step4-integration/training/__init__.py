"""What train.py is made of: where tokens come from and in which order, a step, checkpoints, what is shown meanwhile."""
