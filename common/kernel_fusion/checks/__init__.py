"""What checks the repository itself: its text, its structure, and whether its tests can fail."""
