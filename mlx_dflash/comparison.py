"""The audit: one prompt decoded plainly and with the draft, and where and by how much the two part ways.

Two rows of one verify forward may differ in the last bits from two plain steps (other kernels, another order of
addition), so a near-tie can fall differently. The audit says whether it did, and how near the tie was.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .api import stream_generate
from .errors import OptionError, UnsupportedError
from .pair import Pair
from .responses import GenerationResponse


@dataclass(frozen=True)
class Comparison:
    """Plain against speculative decoding of one prompt.

    Attributes:
        plain, speculative: the last response of each run; rates, mode and acceptance length are in there.
        plain_text, speculative_text: what each said.
        plain_tokens, speculative_tokens: their token ids.
        first_difference: index of the first token that differs, ``None`` when the texts are identical.
        margin: at that index, by how much the plain run preferred its own token to the speculative run's, in
            log-probability: near 0 for a tie that rounding decided, large for a fault.
        largest_difference: the largest absolute difference of the chosen tokens' log-probabilities over the tokens both
            runs agree on. Rounding is about 1e-5 in float32 and 1e-2 in bfloat16; more means the verify forward
            computes something else than the plain step.
        ratio: decoding rate, speculative over plain.
    """

    plain: GenerationResponse
    speculative: GenerationResponse
    plain_text: str
    speculative_text: str
    plain_tokens: tuple[int, ...]
    speculative_tokens: tuple[int, ...]
    first_difference: int | None
    margin: float | None
    largest_difference: float
    ratio: float

    @property
    def identical(self) -> bool:
        return self.first_difference is None

    def verdict(self) -> str:
        """One line for people."""
        if self.first_difference is None:
            return f"identical ({len(self.plain_tokens)} tokens), largest log-probability difference " + (
                f"{self.largest_difference:.1e}"
            )
        return (
            f"differs from token {self.first_difference} on: plain {self._token(self.plain_tokens)}, speculative "
            f"{self._token(self.speculative_tokens)}, top-two margin {self.margin:.1e}"
        )

    def _token(self, tokens: Sequence[int]) -> str:
        assert self.first_difference is not None
        return str(tokens[self.first_difference]) if self.first_difference < len(tokens) else "ends"


def compare(model: Pair, tokenizer: Any, prompt: Any, max_tokens: int = 256, **options: Any) -> Comparison:
    """Decode ``prompt`` greedily both ways, the plain one first, after a short warm-up of each.

    Args:
        model, tokenizer, prompt, max_tokens, **options: as :func:`mlx_dflash.stream_generate`.

    Raises:
        UnsupportedError: no draft is loaded.
        OptionError: sampling was asked for: two samples of one distribution are not expected to be equal.
    """
    if not isinstance(model, Pair) or not model.has_draft:
        raise UnsupportedError("compare: no draft is loaded, so there is nothing to compare plain decoding with")
    if options.get("temp") or options.get("sampler") is not None:
        raise OptionError("compare: found temp above 0, expected greedy decoding; two samples need not be equal")
    for plain in (True, False):
        for _ in stream_generate(model, tokenizer, prompt, min(8, max_tokens), **{**options, "plain": plain}):
            pass
    runs = [
        list(stream_generate(model, tokenizer, prompt, max_tokens, **{**options, "plain": plain}))
        for plain in (True, False)
    ]
    return _compare(*runs)


def _compare(plain: list[GenerationResponse], speculative: list[GenerationResponse]) -> Comparison:
    tokens = [tuple(response.token for response in run) for run in (plain, speculative)]
    pairs = zip(*tokens, strict=False)
    agreed = next((index for index, (a, b) in enumerate(pairs) if a != b), min(len(plain), len(speculative)))
    first = None if tokens[0] == tokens[1] else agreed
    differences = [
        abs(_chosen(plain[index], plain[index].token) - _chosen(speculative[index], plain[index].token))
        for index in range(agreed)
    ]
    margin = None
    if first is not None and first < min(len(plain), len(speculative)):
        here = plain[first]
        margin = _chosen(here, here.token) - _chosen(here, speculative[first].token)
    return Comparison(
        plain=plain[-1],
        speculative=speculative[-1],
        plain_text="".join(response.text for response in plain),
        speculative_text="".join(response.text for response in speculative),
        plain_tokens=tokens[0],
        speculative_tokens=tokens[1],
        first_difference=first,
        margin=margin,
        largest_difference=max(differences, default=0.0),
        ratio=speculative[-1].generation_tps / plain[-1].generation_tps,
    )


def _chosen(response: GenerationResponse, token: int) -> float:
    value = response.logprobs[token].item()
    assert isinstance(value, float)
    return value
