"""The ops of this step as others have them: composed of PyTorch's, which are references too; QuACK's and Liger's."""

import functools

import torch
import torch.nn.functional as F

from kernel_fusion import steps
from kernel_fusion.bench import layers

P = 0.1  # dropout's


def layer_norm(x, weight, bias):
    return F.layer_norm(x, x.shape[-1:], weight, bias)


def residual_layer_norm(x, residual, weight, bias):
    total = x + residual
    return layer_norm(total, weight, bias), total


def front_residual_layer_norm(x, residual, weight, bias, x_bias, mask):
    """With PyTorch's own random numbers; `mask` is for `front_by_mask`."""
    return residual_layer_norm(F.dropout(x + x_bias, P), residual, weight, bias)


def front_by_mask(x, residual, weight, bias, x_bias, mask):
    return residual_layer_norm((x + x_bias) * mask * kept_factor(), residual, weight, bias)


def front_by_the_peers_mask(outputs, x, residual, weight, bias, x_bias, mask):
    total = sum_by_the_peers_mask(outputs[1], (x + x_bias) * kept_factor(), residual)
    return layer_norm(total, weight, bias), total


def layer_norm_backward(grad, x, weight, mean, rstd):
    """What autograd calls for F.layer_norm."""
    statistics = [t.unsqueeze(-1) for t in (mean, rstd)]
    if not x.is_cuda:  # there it wants them in the tensors' dtype
        statistics = [t.to(x.dtype) for t in statistics]
    return torch.ops.aten.native_layer_norm_backward(grad, x, x.shape[-1:], *statistics, weight, weight, [True] * 3)


def attention(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=q.shape[2] > 1).transpose(1, 2).flatten(2)


def attention_residual_layer_norm(q, k, v, residual, weight, bias):
    return layer_norm(attention(q, k, v) + residual, weight, bias)


def attention_block(q, k, v, residual, proj_weight, proj_bias, weight, bias):
    projected = F.linear(attention(q, k, v), proj_weight.mT, proj_bias)
    return residual_layer_norm(projected, residual, weight, bias)


@functools.lru_cache(maxsize=2)
def in_float32(parameter):
    """Converted at the first call with it, so that this is not timed."""
    return parameter.float()


def quack_layer_norm(x, weight, bias):
    """QuACK's: a kernel in CuTe's Python."""
    from quack.rmsnorm import layernorm_fwd

    return layernorm_fwd(x, in_float32(weight), in_float32(bias), eps=1e-5)


def quack_layer_norm_backward(grad, x, weight, mean, rstd):
    from quack.rmsnorm import layernorm_bwd

    return layernorm_bwd(x, weight, grad, rstd, mean)


def liger_layer_norm(x, weight, bias):
    """Liger's: a kernel in Triton."""
    from liger_kernel.ops.layer_norm import layer_norm_forward

    return layer_norm_forward(x, weight, bias, 1e-5)[0]


def liger_layer_norm_backward(grad, x, weight, mean, rstd):
    from liger_kernel.ops.layer_norm import layer_norm_backward

    return layer_norm_backward(grad, x, weight, weight, mean, rstd)


def tanh_gelu(x):
    return F.gelu(x, approximate="tanh")


def linear_gelu(x, weight, bias):
    return tanh_gelu(layers.linear(x, weight, bias))


def linear_gelu_kept(x, weight, bias):
    preactivation = layers.linear(x, weight, bias)
    return tanh_gelu(preactivation), preactivation


def addmm_activation(x, weight, bias):
    """PyTorch's own fused operation: cuBLASLt with GELU behind the product."""
    return torch.ops.aten._addmm_activation(bias, x, weight, use_gelu=True)


def gelu_linear(x, weight, bias):
    return layers.linear(tanh_gelu(x), weight, bias)


def layer_norm_linear(x, norm_weight, norm_bias, weight, bias):
    return layers.linear(layer_norm(x, norm_weight, norm_bias), weight, bias)


def linear_residual(x, weight, bias, residual):
    return layers.linear(x, weight, bias) + residual


def linear_dropout_residual(x, weight, bias, residual, mask):
    """With PyTorch's own random numbers; `mask` is for `dropout_by_mask`."""
    return F.dropout(layers.linear(x, weight, bias), P) + residual


def dropout_by_mask(x, weight, bias, residual, mask):
    return layers.linear(x, weight, bias) * mask * kept_factor() + residual


def mlp(x, weight_1, bias_1, weight_2, bias_2, residual):
    return layers.linear(linear_gelu(x, weight_1, bias_1), weight_2, bias_2) + residual


def mlp_kept(x, weight_1, bias_1, weight_2, bias_2, residual):
    inner, preactivation = linear_gelu_kept(x, weight_1, bias_1)
    return layers.linear(inner, weight_2, bias_2) + residual, preactivation


def quack_linear_gelu(keep: bool):
    """QuACK's product with GELU behind it, in the size of tiles that it takes without trying dozens of them."""

    def run(x, weight, bias):
        from quack.gemm_interface import gemm_act

        preactivation, y = gemm_act(x, weight, bias=bias, activation="gelu_tanh_approx", store_preact=keep, tuned=False)
        return (y, preactivation) if keep else y

    return run


@functools.cache
def triton_product():
    """Step 2's product in Triton, with what follows it."""
    return steps.load_script(steps.find("step2"), "peers/triton_linear")


def triton_linear_residual(*given):
    return triton_product().linear(*given)


def triton_mlp(x, weight_1, bias_1, weight_2, bias_2, residual):
    kernels = triton_product()
    return kernels.linear(kernels.linear_gelu(x, weight_1, bias_1), weight_2, bias_2, residual)


def triton_mlp_kept(x, weight_1, bias_1, weight_2, bias_2, residual):
    kernels = triton_product()
    inner, preactivation = kernels.linear_gelu(x, weight_1, bias_1, keep=True)
    return kernels.linear(inner, weight_2, bias_2, residual), preactivation


def linear_gelu_backward(grad, preactivation, x, weight):
    return layers.linear_backward(aten_gelu_backward(grad, preactivation), x, weight)


def aten_gelu_backward(grad, x):
    return torch.ops.aten.gelu_backward(grad, x, approximate="tanh")


def gelu_linear_backward(grad, x, weight, activation):
    """As PyTorch's backward: the forward has stored `activation`, gelu(x)."""
    through, *rest = layers.linear_backward(grad, activation, weight)
    return aten_gelu_backward(through, x), *rest


def gelu_linear_backward_of_x(grad, x, weight, activation):
    return gelu_linear_backward(grad, x, weight, tanh_gelu(x))


def dropout_backward_by_mask(grad, x, weight, mask):
    """As PyTorch's backward: the forward has stored a mask, a byte an element."""
    return layers.linear_backward(torch.ops.aten.native_dropout_backward(grad, mask, kept_factor()), x, weight)


def kept_factor() -> float:
    """One over the part that dropout keeps."""
    return 65536 / (65536 - round(65536 * P))


def by_the_peers_mask(outputs, x, weight, bias, residual, mask):
    return sum_by_the_peers_mask(outputs[0], layers.linear(x, weight, bias) * kept_factor(), residual)


def sum_by_the_peers_mask(total, value, residual):
    """What is right for a peer with random numbers of its own: read off its `total` which of `value` it kept.

    Raises:
        RuntimeError: it did not keep the right part of them.
    """
    added = total.double() - residual
    taken = (added - value).abs() < added.abs()
    clear = value.abs() > 0.1 * residual.abs() + 0.1  # where rounding cannot hide what was added
    seen, kept = clear.sum().item(), (clear & taken).sum().item()
    if abs(kept / seen - (1 - P)) > 8 * (P * (1 - P) / seen) ** 0.5:
        raise RuntimeError(f"keeps {kept / seen:.5f} of the elements, not {1 - P}")
    return residual + value * taken
