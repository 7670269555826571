"""python pages/usage_example.py: calls each op of this step and compares it with PyTorch. With or without a GPU."""

import torch
import torch.nn.functional as F

import step3_fused

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)


def compare(name, fused, got, expected):
    """Prints the greatest difference, and stops where it is more than rounding."""
    difference = torch.stack([(a - b).abs().max() for a, b in zip(got, expected, strict=True)]).max().item()
    print(f"{name:31} {difference:.1e}   {fused}")
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


# GPT-2 small: 12 heads of 64 columns, so rows of 768. Two sequences of 100 tokens.
batch, length, heads, dim = 2, 100, 12, 64
width = heads * dim

# What a GPT-2 block has in hand after its first projection: q, k and v side by side, and the residual stream.
packed = torch.randn(batch, length, 3 * width, device=device)
q, k, v = (t.view(batch, length, heads, dim).transpose(1, 2) for t in packed.split(width, dim=-1))  # views, no copies
residual = torch.randn(batch, length, width, device=device)
proj_weight = torch.randn(width, width, device=device) * width**-0.5
proj_bias, bias = torch.randn(2, width, device=device)
weight = 1 + 0.1 * torch.randn(width, device=device)

# The same by PyTorch, one operation after the other.
attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
projected = attended @ proj_weight + proj_bias


def normalized(x):
    return F.layer_norm(x, (width,), weight, bias)


print(f"on {device}, float32; the greatest difference from PyTorch's separate operations:\n")

y = step3_fused.layer_norm(residual, weight, bias)
compare("layer_norm", "mean, variance and result from one read", [y], [normalized(residual)])

y, total = step3_fused.residual_layer_norm(projected, residual, weight, bias)
compare(
    "residual_layer_norm", "addition + LayerNorm", [y, total], [normalized(projected + residual), projected + residual]
)

y = step3_fused.attention_residual_layer_norm(q, k, v, residual, weight, bias, causal=True)
compare("attention_residual_layer_norm", "attention + addition + LayerNorm", [y], [normalized(attended + residual)])

y, total = step3_fused.attention_block(q, k, v, residual, proj_weight, proj_bias, weight, bias, causal=True)
expected = projected + residual
compare(
    "attention_block", "attention + projection + addition + LayerNorm", [y, total], [normalized(expected), expected]
)

# They are ordinary ops: gradients flow, and each has several rungs.
parameter = proj_weight.clone().requires_grad_()
step3_fused.attention_block(q, k, v, residual, parameter, proj_bias, weight, bias, causal=True)[0].sum().backward()
print(f"\ngradient of proj_weight: shape {tuple(parameter.grad.shape)}, norm {parameter.grad.norm():.3g}")
print(f"rungs of attention_block on {device}: {', '.join(step3_fused.rungs('attention_block', device))}")
