"""What gpt2_model.py is made of: the forms of a block, the cache of keys and values, files of weights."""
