"""Codecs: numbers in units of their block's scale become codes of 8 bits and less, and back."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from laconic.kernels.kernel import Kernel, Spec

TINY = torch.finfo(torch.float32).tiny  # below it, one over the scale is infinite

NUMBERS, SCALES = Spec(torch.float32, ("blocks", "length")), Spec(torch.float32, ("blocks",))


@dataclass(frozen=True)
class Codec:
    """How a number in units of its block's scale becomes a code, and back.

    Its kernels take (numbers, codes, scales), a row for each block, and write codes and scales. `quantize_left` also
    replaces the numbers by what their codes leave out. `pack` takes a part of the codes for each code that shares a byte,
    and the message; `unpack` the message, and those parts.
    """

    per_word: int  # codes in four bytes
    dtype: torch.dtype  # of codes that are not packed
    quantize: Kernel
    quantize_left: Kernel
    decode: Kernel
    add: Kernel  # the same, added to what is there
    mean: float | None = None  # a block's scale is so many times its mean size; None: the kernel finds it
    pack: Kernel | None = None
    unpack: Kernel | None = None
    stochastic: Kernel | None = None  # as `quantize`, of (numbers, noise, codes, scales)
    stochastic_left: Kernel | None = None

    def kernels(self, *, stochastic: bool = False) -> list[Kernel]:
        """All that can be compiled."""
        rounding = [self.stochastic, self.stochastic_left] if stochastic else [self.quantize, self.quantize_left]
        found = [*rounding, self.decode, self.add, self.pack, self.unpack]
        return [kernel for kernel in found if kernel is not None]

    @property
    def parts(self) -> int:
        """Codes in a byte."""
        return self.per_word // 4

    def room(self, message: Tensor, count: int) -> Tensor:
        """Where the codes of a message are written: one for each number, zeros where there is none."""
        return message.view(self.dtype) if self.parts == 1 else message.new_zeros(count, dtype=self.dtype)

    def seal(self, codes: Tensor, message: Tensor, *, fused: bool) -> None:
        """Put codes into their message, where they are not there already: neighbours in a byte are far apart in the bucket."""
        if self.pack is not None:
            self.pack(message, *codes.view(self.parts, -1), fused=fused)

    def open(self, message: Tensor, count: int, *, fused: bool) -> Tensor:
        """The codes of a message."""
        if self.unpack is None:
            return message.view(self.dtype)
        codes = message.new_empty(count, dtype=self.dtype)
        self.unpack(message, *codes.view(self.parts, -1), fused=fused)
        return codes


class Digits(NamedTuple):
    """Whole numbers lowest, lowest + step, ...: `base` of them, so many in a byte as the digits of a number to that base."""

    base: int
    lowest: int
    step: int

    @property
    def in_a_byte(self) -> int:
        """How many fit."""
        return 5 if self.base == 3 else 8 // (self.base - 1).bit_length()

    def digit(self, number: Tensor) -> Tensor:
        """The digit of each whole number, which may be overwritten."""
        return number.sub_(self.lowest).mul_(1 / self.step)

    def number(self, digit: Tensor) -> Tensor:
        """And back."""
        return digit.mul_(self.step).add_(self.lowest)

    def pack(self, message: Tensor, *digits: Tensor) -> None:
        """Digits into bytes."""
        packed = digits[-1]
        for each in digits[-2::-1]:
            packed = packed * self.base + each
        message.copy_(packed)

    def unpack(self, message: Tensor, *digits: Tensor) -> None:
        """Bytes into digits."""
        if self.base != 3:
            bits = (self.base - 1).bit_length()
            for place, each in enumerate(digits):
                each.copy_((message >> (place * bits)) & (self.base - 1))
            return
        rest = message.float()
        for each in digits:
            higher = ((rest + 0.5) * (1 / 3)).floor_()
            each.copy_(rest - higher * 3)
            rest = higher


def whole_numbers(
    name: str,
    home: str,
    round_: Callable[[Tensor], Tensor],
    digits: Digits | None = None,
    *,
    limit: float | None = None,
    mean: float | None = None,
) -> Codec:
    """Whole numbers, in bytes of their own or packed as `digits`; the kernels are made in the module `home`.

    A block's largest number becomes `limit`, or `mean` times its mean size becomes 1. `round_` may overwrite what it is given.
    """
    if digits is None:
        return codec(name, home, 4, torch.int8, round_, Tensor.float, limit=limit, mean=mean, stochastic=True)
    return codec(
        name,
        home,
        4 * digits.in_a_byte,
        torch.uint8,
        lambda scaled: digits.digit(round_(scaled)),
        lambda codes: digits.number(codes.float()),
        limit=limit,
        mean=mean,
        stochastic=limit is not None,
        pack=digits.pack,
        unpack=digits.unpack,
    )


def codec(
    name: str,
    home: str,
    per_word: int,
    dtype: torch.dtype,
    code: Callable[[Tensor], Tensor],
    number: Callable[[Tensor], Tensor],
    *,
    limit: float | None = None,
    mean: float | None = None,
    stochastic: bool = False,
    pack: Callable[..., None] | None = None,
    unpack: Callable[..., None] | None = None,
) -> Codec:
    """A codec of `code`, from numbers in units of their scale, which it may overwrite, and `number`, back from codes."""

    def quantize(numbers: Tensor, *rest: Tensor) -> None:
        (*noise, codes, scales) = rest
        if limit is not None:
            scales.copy_(numbers.abs().amax(1).mul_(1 / limit))
        # A block of zeros, or of next to nothing, becomes zeros; what is not a number is in the scale.
        scaled = numbers * torch.where(scales >= TINY, 1 / scales, 0).unsqueeze(1)
        if noise:
            # fp32 rounds limit + noise up to limit + 1 where the noise is next to 1: as a code, a negative number.
            assert limit is not None
            scaled = scaled.add_(noise[0]).floor_().clamp_max_(limit)
        codes.copy_(code(scaled))

    def quantize_left(numbers: Tensor, *rest: Tensor) -> None:
        quantize(numbers, *rest)
        codes, scales = rest[-2:]
        # Two roundings, as the peers have: what is kept is what they lack, to the bit.
        numbers.sub_(number(codes).mul_(scales.unsqueeze(1)))

    def decode(codes: Tensor, scales: Tensor, out: Tensor) -> None:
        out.copy_(number(codes)).mul_(scales.unsqueeze(1))

    def add(codes: Tensor, scales: Tensor, out: Tensor) -> None:
        out.add_(number(codes).mul_(scales.unsqueeze(1)))

    coded = Spec(dtype, NUMBERS.sizes)
    byte, part = Spec(torch.uint8, ("bytes",)), Spec(dtype, ("bytes",))
    packed = [byte, *[part] * (per_word // 4)]

    def kernel(what: str, function: Callable[..., None], *specs: Spec) -> Kernel:
        return Kernel(f"{name}-{what}", function, *specs, home=home)

    return Codec(
        per_word,
        dtype,
        kernel("quantize", quantize, NUMBERS, coded, SCALES),
        kernel("quantize-left", quantize_left, NUMBERS, coded, SCALES),
        kernel("decode", decode, coded, SCALES, NUMBERS),
        kernel("add", add, coded, SCALES, NUMBERS),
        mean,
        kernel("pack", pack, *packed) if pack is not None else None,
        kernel("unpack", unpack, *packed) if unpack is not None else None,
        kernel("stochastic", quantize, NUMBERS, NUMBERS, coded, SCALES) if stochastic else None,
        kernel("stochastic-left", quantize_left, NUMBERS, NUMBERS, coded, SCALES) if stochastic else None,
    )
