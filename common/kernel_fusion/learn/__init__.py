"""What leads a reader through: the tour and the exercises."""
