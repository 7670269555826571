"""What the four steps share and none of them teaches: building, testing, benchmarking and reporting."""
