"""CUDA sources as C++: rewrite.py and ptx.py write it, refusals.py says what is lacking, views.py compiles it."""
