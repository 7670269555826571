"""What the four steps share and none of them teaches: building, testing, benchmarking and reporting."""

__version__ = "0.1.0"
