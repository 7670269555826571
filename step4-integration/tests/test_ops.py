"""What holds for all of this step's ops."""

import pytest
import torch

import step4_integration
from kernel_fusion import testing
from step4_integration.testing import check_append, check_embedding, on_each_device, tables


@pytest.mark.parametrize("schedule", ["random:1", "random:2"])
def test_emulated_threads_may_run_in_any_order(schedule, monkeypatch):
    monkeypatch.setenv("KF_SIMT_SCHEDULE", schedule)
    for rung in step4_integration.rungs("embedding", "cpu"):
        check_embedding(tables(2, 9, 40, torch.float32, "cpu"), rung)
    for rung in step4_integration.rungs("kv_append", "cpu"):
        check_append(rung, torch.float32, "cpu")


DECIDE_NOTHING = {"temperature", "top_k", "top_p", "layers", "context"}
SIZES_OF_ARGS = {"B": "batch", "H": "heads", "S": "length", "D": "head_dim"}


@pytest.mark.parametrize("op", ["embedding", "kv_append", "cross_entropy", "sample", "decode_step"])
def test_auto_is_read_off_the_results(op):
    def sizes(shape):
        if "depth" in shape:  # linear_cross_entropy's: its products are in the time
            return None
        return {SIZES_OF_ARGS.get(k, k): n for k, n in shape.items() if k not in DECIDE_NOTHING}

    # Those only who has packed the weights can have.
    packed = list(step4_integration.PACKED_RUNGS) if op == "decode_step" else []
    testing.check_automatic(step4_integration, op, sizes, besides=packed)


@pytest.mark.parametrize("overload", testing.writing_overloads("step4_integration"), ids=str)
def test_what_an_op_writes_is_known_to_autograd(overload):
    testing.check_writes(overload)


@on_each_device
def test_an_output_that_shares_memory_with_anything_is_refused(device):
    testing.check_apart(step4_integration, "embedding", tables(2, 5, 8, torch.float32, device))
    k = testing.randn((2, 3, 4, 8), torch.float32, device)
    caches = torch.zeros(2, 2, 3, 9, 8, device=device)
    testing.check_apart(step4_integration, "kv_append", (caches[0], caches[1], k, k.clone(), 2))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_tensors_on_several_devices_are_refused():
    ids, token_weight, position_weight = tables(2, 5, 8, torch.float32, "cuda")
    with testing.raises(ValueError, "embedding: `ids` must be on the device of `token_weight` (cuda:0), got cpu"):
        step4_integration.embedding(ids.cpu(), token_weight, position_weight)
    with testing.raises(ValueError, "embedding: `position_weight` must be on the device of `token_weight`"):
        step4_integration.embedding(ids, token_weight, position_weight.cpu())


def test_rungs_of_an_unknown_op_are_refused():
    with testing.raises(ValueError, "rungs: `op` must be 'embedding'", "got 'unembedding'"):
        step4_integration.rungs("unembedding")
    assert "cpu" not in step4_integration.rungs("embedding", "cuda")


def test_a_step_that_is_not_built_says_how_to_build_it(tmp_path):
    testing.check_not_built("step4_integration", tmp_path)
