"""Lists of faults to plant, a file a layer or an op."""
