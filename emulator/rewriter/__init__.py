"""CUDA sources as C++: rewrite.py writes it, refusals.py says what is lacking, views.py compiles it."""

from pathlib import Path

OWN_INCLUDE = Path(__file__).resolve().parents[1] / "include"
