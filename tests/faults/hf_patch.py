"""transformers' model with our attention, and the tour's step with both."""

from kernel_fusion.checks.faults import Fault

MODEL = "step4-integration/gpt2_model.py"
WEIGHTS = "step4-integration/gpt2_weights.py"
GENERATE = "step4-integration/generate.py"
TRAIN = "step4-integration/train.py"
PATCH = "step4-integration/hf_patch.py"
TOUR = "step4-integration/demonstrations.py"
INTEGRATION = "step4-integration/test_integration.py"
TRAINING = "step4-integration/tests/test_training.py"
CHECKPOINTS4 = "step4-integration/tests/test_checkpoints.py"
HF_PATCH4 = "step4-integration/tests/test_hf_patch.py"
ON_DISK = "step4-integration/tests/test_weights.py"
CROSSES = f"{HF_PATCH4}::test_a_layer_that_is_computed_again_on_the_other_side_of_the_patch_is_an_error"
REFUSES = f"{HF_PATCH4}::test_the_patched_model_refuses_what_the_op_cannot_do"

FAULTS = [
    Fault(
        "patch-without-causality",
        "the patched model sees the future",
        PATCH,
        "causal=True, scale=scaling",
        "causal=False, scale=scaling",
        f"{HF_PATCH4}::test_the_patched_model_equals_the_unpatched[cpu]",
    ),
    Fault(
        "patch-without-scale",
        "the patched model's attention takes its default scale",
        PATCH,
        "causal=True, scale=scaling",
        "causal=True",
        f"{HF_PATCH4}::test_the_scale_of_a_layer_is_taken",
    ),
    Fault(
        "patch-forgets-its-mask",
        "the mask's function is not registered",
        PATCH,
        "AttentionMaskInterface.register(NAME, causal_only)\n",
        "",
        REFUSES,
    ),
    Fault(
        "padding-ignored",
        "a mask of padding is ignored",
        PATCH,
        "if attention_mask is not None and not attention_mask[:, kv_offset:k_end].all():",
        "if False:",
        REFUSES,
    ),
    Fault(
        "short-mask-ignored",
        "keys past the end of a mask are seen",
        PATCH,
        "if given < q_end:",
        "if False:",
        f"{HF_PATCH4}::test_a_mask_that_hides_a_key_is_refused[shorter than the keys-True]",
    ),
    Fault(
        "is-causal-ignored",
        "a layer that is not causal is computed as if it were",
        PATCH,
        "if not (module.is_causal and (is_causal is None or is_causal)):",
        "if False:",
        f"{HF_PATCH4}::test_what_changes_the_meaning_of_attention_is_refused_by_name[sdpa-of a layer]",
    ),
    Fault(
        "checkpoint-crosses-out",
        "a layer that ran under the patch is computed again without it",
        PATCH,
        "    return CAUSAL\n",
        "    return None\n",
        f"{CROSSES}[sdpa-reentrant]",
    ),
    Fault(
        "checkpoint-crosses-in",
        "a layer that ran without the patch is computed again under it",
        PATCH,
        "if torch._C._current_graph_task_id() != -1:",
        "if False:",
        f"{CROSSES}[sdpa-reentrant]",
    ),
    Fault(
        "config-shared",
        "a model of the same config is patched too",
        PATCH,
        "{id(config): copy.deepcopy(config) for",
        "{id(config): config for",
        f"{HF_PATCH4}::test_a_model_of_the_same_config_is_not_patched",
    ),
    Fault(
        "weights-asked-in-vain",
        "`output_attentions` gives nothing, without a word",
        PATCH,
        "if isinstance(module, GPT2Model):",
        "if False:",
        f"{HF_PATCH4}::test_what_changes_the_meaning_of_attention_is_refused_by_name[sdpa-output_attentions]",
    ),
    Fault(
        "dropout-ignored",
        "attention's dropout is left out in training, without a word",
        PATCH,
        "dropout_p=dropout)",
        "dropout_p=0.0)",
        "step4-integration/tests/test_hf_patch.py::test_patched_training_drops_weights_of_attention_and_evaluation_none",
    ),
    Fault(
        "static-cache-ignored",
        "queries before the last key, as with a static cache, are taken for the last",
        PATCH,
        "if q_end != k_end:",
        "if False:",
        REFUSES,
    ),
    Fault(
        "patch-stays-after-an-error",
        "an exception leaves the model patched",
        PATCH,
        "    try:\n        yield model\n    finally:\n        remove(model)\n",
        "    yield model\n    remove(model)\n",
        f"{HF_PATCH4}::test_patching_is_undone_after_an_error_and_refused_twice",
    ),
    Fault(
        "tour-compares-nothing",
        "the tour's step does not look at the tokens",
        TOUR,
        "    if different:\n",
        "    if False:\n",
        f"{INTEGRATION}::test_the_tours_step_fails_where_a_token_is_another",
    ),
    Fault(
        "tour-counts-nothing",
        "the tour's step does not look at the launches",
        TOUR,
        "if (launches, our_launches, launches_after) != (0, expected, 0):",
        "if False:",
        f"{INTEGRATION}::test_the_tours_step_fails_where_our_attention_did_not_run",
    ),
    Fault(
        "heads-of-large",
        "gpt2-large has heads of 80",
        MODEL,
        '"gpt2-large": Config(n_embd=1280, n_layer=36, n_head=20)',
        '"gpt2-large": Config(n_embd=1280, n_layer=36, n_head=16)',
        f"{CHECKPOINTS4}::test_the_four_sizes_have_gpt2s_parameters",
    ),
    Fault(
        "pytorchs-tanh-is-exact",
        "`gelu_pytorch_tanh` is the exact GELU",
        MODEL,
        '"gelu_pytorch_tanh": "tanh"',
        '"gelu_pytorch_tanh": "none"',
        f"{INTEGRATION}::test_an_activation_is_what_transformers_calls_so",
    ),
    Fault(
        "renamed-before-written",
        "weights take their place before they are on the disk",
        WEIGHTS,
        "            sync(beside(weights))\n",
        "",
        f"{ON_DISK}::test_a_file_is_on_the_disk_before_it_takes_its_place",
    ),
    Fault(
        "an-alias-forgotten",
        "a name of transformers' for an entry is not known",
        WEIGHTS,
        '"num_hidden_layers": "n_layer",\n           "max_position_embeddings": "n_positions"}',
        '"num_hidden_layers": "n_layer"}',
        f"{ON_DISK}::test_other_names_of_an_entry_are_those_of_transformers",
    ),
    Fault(
        "no-weights-from-the-hub",
        "a model comes from the hub without its weights",
        WEIGHTS,
        '["*.json", "*.safetensors", "*.txt"]',
        '["*.json", "*.txt"]',
        f"{CHECKPOINTS4}::test_a_name_on_the_hub_is_fetched",
    ),
    Fault(
        "metadata-forgotten",
        "the file of weights does not say whose format it is",
        WEIGHTS,
        'save_file(tensors, beside(weights), metadata={"format": "pt"})',
        "save_file(tensors, beside(weights))",
        f"{CHECKPOINTS4}::test_transformers_reads_what_we_save[torch.bfloat16]",
    ),
    Fault(
        "seeds-of-63-bits",
        "seeds of 64 bits are refused",
        GENERATE,
        "if not -(1 << 63) <= seed < 1 << 64:",
        "if not -(1 << 63) <= seed < 1 << 63:",
        f"{ON_DISK}::test_the_first_and_the_last_seed_are_taken[18446744073709551615]",
    ),
    Fault(
        "the-vocabularys-size-is-a-token",
        "a prompt may hold the first token past the vocabulary",
        GENERATE,
        "if max(ids) >= vocab_size:",
        "if max(ids) > vocab_size:",
        f"{ON_DISK}::test_bytes_and_a_vocabulary_of_another_size[104]",
    ),
    Fault(
        "bar-adds-up",
        "the bar on a terminal adds up how far the training was",
        TRAIN,
        "bar.update(task, completed=progress, note=note)",
        "bar.update(task, advance=progress, note=note)",
        f"{TRAINING}::test_a_bar_on_a_terminal_is_as_full_as_the_training_is_done",
    ),
    Fault(
        "no-cpp-documents",
        "sources in C++ are not trained on",
        TRAIN,
        '".cu", ".cpp", ".h"',
        '".cu", ".h"',
        f"{TRAINING}::test_what_is_built_installed_or_hidden_is_no_document",
    ),
    Fault(
        "last-position-for-the-first",
        "the queries of older versions of transformers begin with the last",
        PATCH,
        "len(cache_position), int(cache_position[0])",
        "len(cache_position), int(cache_position[-1])",
        f"{HF_PATCH4}::test_older_versions_of_transformers_give_the_queries_positions",
    ),
    Fault(
        "softcap-is-let-through",
        "scores that should be capped are not, without a word",
        PATCH,
        '"position_bias", "softcap", "s_aux"',
        '"position_bias", "s_aux"',
        f"{HF_PATCH4}::test_what_a_call_hands_on_to_attention_is_refused_by_name[softcap]",
    ),
    Fault(
        "false-is-not-asked",
        "a call that asks for no weights is refused where the config asks for them",
        PATCH,
        "if asked or (asked is None and model.config.output_attentions):",
        "if asked or model.config.output_attentions:",
        f"{HF_PATCH4}::test_a_call_may_ask_for_no_weights_where_the_config_asks_for_them",
    ),
]
