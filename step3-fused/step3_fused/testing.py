"""What the tests of ops that fuse something to a product share: which rungs can do what."""

from step2_attention.linear_testing import fits_tensor_cores

TENSOR_CORES = ("v2_mma", "v3_hopper", "v5_in_place", "v5_rows", "v6_one_launch", "v7_inner")


# test_a_rung_refuses_what_it_says holds the rungs to it.
def can_do(rung, device, rows, depth, width, dtype, transposed, backward=False):
    if rung in ("v5_rows", "v7_inner") and rows > 64:
        return False
    if rung not in TENSOR_CORES:
        return True
    return fits_tensor_cores(rung, device, rows, depth, width, dtype, transposed, backward, on_any_gpu=("v2_mma",))
