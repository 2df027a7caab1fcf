"""The expected output of each module, computed from its actual input and the trainer's weights.

Trainer and engine diverge after the first wrong value, so comparing the two says little about later modules.
Here every value of one side is recomputed from *that side's own* earlier values, so that each module is
checked by itself, without inherited errors. Every step from the embedding to the log-probs is covered: if all
modules pass, the two sides differ only by rounding.

A possible cause of an error is a copy of the checker with other weights or another model shape
(``dataclasses.replace``).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from rpg_megatron.checkpoints.parameter_readers import Weights
from rpg_megatron.config import ModelShape
from rpg_megatron.config.model_shape import ExpertShape, YarnRope
from rpg_megatron.models.activation_sites import (
    FINAL_INPUT,
    FINAL_NORM,
    LOGITS,
    NORMS,
    SHARED_EXPERT,
    Trace,
    all_sites,
    block_output,
    expert_matrices,
    layer_site,
    parameter_of,
    shared_gate,
    split_site,
)
from rpg_megatron.models.layer import stored_rows
from rpg_megatron.policy.rotary import rotary_frequencies
from rpg_megatron.system.dtypes import torch_dtype

TOLERANCE = {"float32": 5e-5, "bfloat16": 2e-2, "float16": 2.5e-3}
"""Largest relative error of a module due to rounding. Of correct pairs (docs/evidence/audit.md): at most
2e-6 in float32 and 6e-3 in bfloat16, except for experts (see ``tolerance``); larger models round more.
float16 was not measured; its rounding errors are an eighth of bfloat16's.
"""
CHANNEL_TOLERANCE = {"float32": 5e-5, "bfloat16": 6e-3, "float16": 7.5e-4}
"""Largest relative error of a norm's channel, averaged over tokens: rounding errors cancel unless all tokens
are equal. Without averaging, two roundings to bfloat16, as in Hugging Face's norm, are 3.9e-3 at most.
"""

_FROM = {
    "input_norm": "input",
    "query": "input_norm",
    "key": "input_norm",
    "value": "input_norm",
    "query_norm": "query",
    "key_norm": "key",
    "attention_output": "attention",
    "mlp_norm": "middle",
    "mlp_output": "activation",
    FINAL_NORM: FINAL_INPUT,
    LOGITS: FINAL_NORM,
}
"""Modules with a parameter, and the site that each computes from."""
_TEMPERATURES = (0.02, 50.0, 80)  # lowest, highest, points of the first grid
_TEMPERATURE_TOLERANCE = 0.05
"""Relative error of a temperature fitted to rounded log-probs that may be due to chance."""


@dataclass
class ActivationTrace:
    """The values of engine or trainer for the same tokens. Sequences are concatenated: t positions in all."""

    name: str
    trace: Trace
    tokens: Tensor
    """int64 [t]: the input token at each position."""
    lengths: list[int]
    """Positions of each sequence."""
    predicts: Tensor
    """bool [t]: whether the next token was sampled."""
    sampled: Tensor
    """int64 [n]: the n sampled tokens."""
    logp: Tensor
    """float32 [n]: their log-probs as this side reports them, nats."""
    dtype: str
    """Dtype of its activations: float32 or bfloat16."""


@dataclass
class ModuleChecker:
    """Compares each value of one side with the value expected from the side's own earlier values."""

    side: ActivationTrace
    shape: ModelShape
    weights: Weights
    """The expected weights."""
    temperature: float
    device: torch.device = field(default=torch.device("cpu"))
    """Where to compute; values and weights are moved there on demand."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the arithmetic: exact enough that only the side's own rounding remains."""
        return torch.float64 if self.side.dtype == "float32" else torch.float32

    def sites(self) -> list[str]:
        """Sites that the side has values for, in the order of computation."""
        return [s for s in all_sites(self.shape) if s in self.side.trace]

    def found(self, site: str) -> Tensor:
        """The side's values; recomputed if the trace has none."""
        if site in self.side.trace:
            return self._local(self.side.trace[site])
        return self.expected(site)

    def expected(self, site: str) -> Tensor:
        """The values of a site expected from earlier ones: [t, width]; logits only at sampled positions."""
        layer, part = split_site(site)

        def before(name: str) -> Tensor:
            return self.found(layer_site(layer, name) if layer is not None else name)

        name = parameter_of(site, self.shape.tied_embeddings)
        weight = None if name is None else self._weight(name)
        if part == "input" and weight is not None:
            return weight[self.side.tokens.to(self.device)]
        if part in ("input", FINAL_INPUT):
            last = (self.shape.num_layers if layer is None else layer) - 1
            return self.found(layer_site(last, "middle")) + self.found(block_output(self.shape, last))
        if part in ("query_rope", "key_rope"):
            plain = part.removesuffix("_rope")
            assert layer is not None
            return self._rotate(before(f"{plain}_norm" if self.shape.qk_norm else plain), layer)
        if part == "attention":
            assert layer is not None
            return self._attend(before("query_rope"), before("key_rope"), before("value"), layer)
        if part == "middle":
            return before("input") + before("attention_output")
        if part == "experts":
            assert layer is not None
            return self._run_experts(layer)
        if part == "activation":
            return F.silu(before("gate")) * before("up")
        assert weight is not None
        x = before(_FROM.get(part, "mlp_norm"))  # of router, gate and up
        if part in NORMS:
            return self._rms(x, weight)
        if part == LOGITS:
            x = x[self.side.predicts.to(self.device)]
        out = x @ weight.t()
        if self.shape.qkv_bias and part in ("query", "key", "value") and name is not None:
            out = out + self._weight(name.replace(".weight", ".bias"))
        return out

    def _run_experts(self, layer: int) -> Tensor:
        """The output of a layer's experts, from the router's logits: [t, hidden]."""
        experts, x = self.shape.experts, self.found(layer_site(layer, "mlp_norm"))
        assert experts is not None
        weights = routing_weights(self.found(layer_site(layer, "router")), experts)
        blocks = {f"experts.{e}": weights[:, e] for e in range(experts.count)}
        if experts.shared_ffn_hidden_size:
            blocks[SHARED_EXPERT] = (x @ self._weight(shared_gate(layer)).t()).sigmoid()[:, 0]
        out = torch.zeros_like(x)
        for block, scale in blocks.items():
            tokens = scale.nonzero()[:, 0]
            if tokens.numel():
                gate, up, down = (self._local(self.weights(name)) for name in expert_matrices(layer, block))
                hidden = F.silu(x[tokens] @ gate.t()) * (x[tokens] @ up.t())
                out[tokens] += scale[tokens, None] * (hidden @ down.t())
        return out

    def _rotate(self, x: Tensor, layer: int) -> Tensor:
        """Rotary embedding of heads [t, heads * d], in Hugging Face's half-rotation convention."""
        rope, d = self.shape.rope_of(layer), self.shape.head_dim
        size, magnitude = int(d * rope.fraction), 1.0
        if rope.scaling is None:
            frequencies = rope.theta ** (-torch.arange(0, size, 2, dtype=self.dtype) / size)
        else:
            frequencies = rotary_frequencies(rope, d)
        if isinstance(rope.scaling, YarnRope):
            magnitude = rope.scaling.magnitude
        positions = torch.cat([torch.arange(n) for n in self.side.lengths])
        angles = positions.to(self.device)[:, None, None] * self._local(frequencies)
        heads = x.unflatten(1, (-1, d))
        a, b = heads[..., :size].chunk(2, dim=-1)
        cos, sin = angles.cos() * magnitude, angles.sin() * magnitude
        return torch.cat([a * cos - b * sin, b * cos + a * sin, heads[..., size:]], -1).flatten(1)

    def logprobs(self, temperature: float | None = None) -> Tensor:
        """Log-probs of the sampled tokens [n] from the side's own logits, or from its last norm."""
        logits = self.logits / (temperature or self.temperature)
        return logits.gather(1, self.side.sampled.to(self.device)[:, None])[:, 0] - logits.logsumexp(1)

    @cached_property
    def fitted_temperature(self) -> tuple[float, float]:
        """The temperature that best fits the reported log-probs, and the remaining RMS difference relative
        to that at the configured temperature.

        The best point of a logarithmic grid, then of ever finer ones around it.
        """

        def error(temperature: float) -> float:
            return (self.logp() - self.logprobs(temperature)).square().mean().sqrt().item()

        low, high, steps = _TEMPERATURES
        while True:
            grid = torch.logspace(math.log10(low), math.log10(high), steps, dtype=torch.float64).tolist()
            errors = [error(temperature) for temperature in grid]
            best = min(range(steps), key=errors.__getitem__)
            if high < low * (1 + 1e-9):
                return grid[best], errors[best] / max(error(self.temperature), 1e-30)
            low, high, steps = grid[max(best - 1, 0)], grid[min(best + 1, steps - 1)], 7

    @cached_property
    def logits(self) -> Tensor:
        """The side's logits, or those computed from its last norm: float64 [n, vocabulary]. Cached."""
        return self.found(LOGITS).double()

    def logp(self) -> Tensor:
        """The log-probs that the side reports: float64 [n]."""
        return self.side.logp.to(self.device).double()

    def error(self, site: str, expected: Tensor | None = None) -> float:
        """Distance of a site's values from the expected ones, see ``distance``. NaN counts as infinite."""
        actual = self.found(site)
        if expected is None:
            expected = self.expected(site)
        layer, part = split_site(site)
        if part == "experts" and layer is not None and self.shape.experts is not None:
            ambiguous = undecided(self.found(layer_site(layer, "router")), self.shape.experts)
            expected = torch.where(ambiguous[:, None], actual, expected)
        worst = distance(actual, expected)
        if part in NORMS:
            off = (self._channel_ratios(site, expected) - 1).abs().max().item()
            # Scaled so that the channel tolerance equals the tolerance.
            worst = max(worst, off * TOLERANCE[self.side.dtype] / CHANNEL_TOLERANCE[self.side.dtype])
        return worst if math.isfinite(worst) else math.inf

    def logprob_error(self, expected: Tensor | None = None) -> float:
        """Largest |reported - expected log-prob|, relative to the largest logit over the temperature, as the
        rounding of the logits is.

        A confident policy's log-probs hardly depend on the temperature, and rounding could hide a wrong one.
        So if another temperature explains most of the difference, its distance counts as well.
        """
        if expected is None:
            temperature, left = self.fitted_temperature
            off = abs(math.log(temperature / self.temperature)) / _TEMPERATURE_TOLERANCE
            if left < 1 / 3 and off > 1:
                return max(off * self.tolerance(LOGITS), self.logprob_error(self.logprobs()))
            expected = self.logprobs()
        size = max(1.0, (self.logits.abs().max() / self.temperature).item())
        worst = ((self.logp() - expected).abs().max() / size).item()
        return worst if math.isfinite(worst) else math.inf

    def tolerance(self, site: str) -> float:
        """Largest error of a site due to rounding."""
        tolerance = TOLERANCE[self.side.dtype]
        if site.endswith("_rope"):  # the rounding error of a frequency grows with the position
            tolerance += 2.4e-7 * max(self.side.lengths)
        layer, part = split_site(site)
        if part == "experts" and layer is not None:
            tolerance *= 2  # measured: up to 1e-2 in bfloat16
            if self.shape.experts and not self.shape.experts.normalised:
                # vLLM's CPU kernel rounds the log-sum-exp of the softmax, which scales all weights.
                total = self.found(layer_site(layer, "router")).logsumexp(1).abs().max().item()
                tolerance += torch.finfo(torch_dtype(self.side.dtype)).eps / 2 * total
        return tolerance

    def weight_rounding(self, site: str) -> float:
        """Error from rounding a norm's weights to the side's dtype; 0 for matrices, where it averages out."""
        ratio = TOLERANCE[self.side.dtype] / CHANNEL_TOLERANCE[self.side.dtype]
        return torch.finfo(torch_dtype(self.side.dtype)).eps / 2 * ratio * (split_site(site)[1] in NORMS)

    def _channel_ratios(self, site: str, expected: Tensor) -> Tensor:
        """[width] least-squares factor from expected to found values of each channel of a norm.

        Heads that share a norm's weight are fitted together.
        """
        per_head = site.endswith(("query_norm", "key_norm")) and not self.shape.wide_qk_norm
        width = self.shape.head_dim if per_head else expected.size(-1)
        f, e = self.found(site).reshape(-1, width), expected.reshape(-1, width)
        return (f * e).sum(0) / e.square().sum(0).clamp(min=1e-30)

    def _weight(self, name: str) -> Tensor:
        stored, rows = stored_rows(self.shape, name)
        return self._local(self.weights(stored)[rows])

    def _local(self, values: Tensor) -> Tensor:
        return values.to(self.device, self.dtype)

    def _rms(self, x: Tensor, weight: Tensor) -> Tensor:
        x = x.unflatten(1, (-1, weight.numel()))
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + self.shape.norm_eps)
        return (x * scale * weight).flatten(1)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        heads = [x.unflatten(1, (-1, self.shape.head_dim)).transpose(0, 1) for x in (q, k, v)]
        queries, keys, values = (x.split(self.side.lengths, dim=1) for x in heads)
        window, out = self.shape.window(layer) or max(self.side.lengths), []
        for q, k, v in zip(queries, keys, values, strict=True):
            seen = torch.ones(q.size(1), q.size(1), dtype=torch.bool, device=q.device).tril().triu(1 - window)
            out.append(F.scaled_dot_product_attention(q, k, v, seen, enable_gqa=True))
        return torch.cat(out, 1).transpose(0, 1).flatten(1)


def distance(actual: Tensor, expected: Tensor) -> float:
    """Largest relative error of a token over its channels, or of a channel over the tokens; 0 if equal.

    Channels smaller than average are measured relative to the average: rounding is relative to the terms of a
    sum, not to the result.
    """
    wide = torch.float64 if expected.dtype == torch.float64 else torch.float32
    off, size = (actual.to(wide) - expected.to(wide)).square(), expected.to(wide).square()
    worst = 0.0
    for dim in (1, 0):
        scale = size.sum(dim)
        scale = scale.clamp(min=max(scale.mean().item(), 1e-30)) if dim == 0 else scale.clamp(min=1e-30)
        worst = max(worst, (off.sum(dim) / scale).max().sqrt().nan_to_num(nan=math.inf).item())
    return worst


def routing_weights(logits: Tensor, experts: ExpertShape) -> Tensor:
    """Weight of each expert for each token: [t, experts], 0 for experts that are not chosen."""
    top, chosen = logits.topk(experts.per_token, dim=1)
    among = top if experts.normalised else logits
    weights = (top - among.logsumexp(1, keepdim=True)).exp()
    return torch.zeros_like(logits).scatter_(1, chosen, weights)


def undecided(logits: Tensor, experts: ExpertShape) -> Tensor:
    """Tokens whose logits do not determine the choice of experts: bool [t].

    The logits of the last chosen expert and the next one are equal, as is common in bfloat16, or so close
    that the rounding of a softmax decides.
    """
    if experts.per_token == experts.count:
        return torch.zeros(logits.size(0), dtype=torch.bool, device=logits.device)
    top = logits.topk(experts.per_token + 1, dim=1).values
    return top[:, -2] - top[:, -1] <= 1e-6 * (1 + logits.abs().amax(1))
