"""Philox and dropout's mask in PyTorch's integers: what the kernels' masks are compared with."""

import math

import torch


def philox(seed: int, offset: int, subsequence: torch.Tensor) -> list[torch.Tensor]:
    """Philox4x32-10 as its paper has it, in PyTorch's 64-bit integers."""
    word = 0xFFFFFFFF
    zero = torch.zeros_like(subsequence)
    x, y = zero + (offset & word), zero + (offset >> 32 & word)
    z, w = subsequence & word, subsequence >> 32 & word
    key_x, key_y = seed & word, seed >> 32 & word
    for _ in range(10):
        x, y, z, w = (
            high_product(0xCD9E8D57, z) ^ y ^ key_x,
            low_product(0xCD9E8D57, z),
            high_product(0xD2511F53, x) ^ w ^ key_y,
            low_product(0xD2511F53, x),
        )
        key_x, key_y = key_x + 0x9E3779B9 & word, key_y + 0xBB67AE85 & word
    return [x, y, z, w]


def low_product(a: int, b: torch.Tensor) -> torch.Tensor:
    return a * (b & 0xFFFF) + (a * (b >> 16) % (1 << 16) << 16) & 0xFFFFFFFF


def high_product(a: int, b: torch.Tensor) -> torch.Tensor:
    return (a * (b >> 16) + (a * (b & 0xFFFF) >> 16)) >> 16


def random_numbers(shape, rng_state: torch.Tensor, first: int = 0) -> torch.Tensor:
    """The 16-bit number of each element, of which the first is number `first`, a multiple of 8, of its tensor."""
    count = math.prod(shape)
    seed, offset = rng_state.tolist()
    words = philox(seed, offset // 4, torch.arange(first // 8, (first + count + 7) // 8))
    numbers = torch.stack([part for word in words for part in (word & 0xFFFF, word >> 16)], 1)
    return numbers.flatten()[:count].reshape(shape)


def mask_and_factor(shape, p: float, rng_state: torch.Tensor, first: int = 0) -> tuple[torch.Tensor, float]:
    threshold = round(65536 * p)
    mask = (random_numbers(shape, rng_state.cpu(), first) >= threshold).to(rng_state.device)
    return mask, 65536 / (65536 - threshold) if threshold < 65536 else 0.0
