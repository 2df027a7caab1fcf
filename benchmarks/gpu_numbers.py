"""How much the policy's numbers differ in BF16 and FP8: log-probs and gradients, against float32 and BF16.

``python -m benchmarks.gpu_numbers`` gives one random checkpoint (``--layers`` of ``--shape``) to transformers
in BF16, to the policy in float32 with Megatron's own layers, as on a CPU, and to the policy in BF16 and each
FP8 recipe with Transformer Engine's. Log-probs: mean and largest difference, in nats, over all tokens.
Gradients: norm of the difference over the norm, all parameters together. Not yet run on a GPU.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from benchmarks.gpu_policies import SHAPES, batch_of, forget, machine, precision_of, start, write_checkpoint
from rpg_megatron.checkpoints.hf_import import load_hf_weights
from rpg_megatron.config import ModelShape, Settings
from rpg_megatron.data.trajectory import Trajectory
from rpg_megatron.models.dense import FUSED
from rpg_megatron.models.registry import mapping_for
from rpg_megatron.policy.model import Mesh
from rpg_megatron.policy.policy import Policy
from rpg_megatron.training.loss import build_aggregator, build_loss


def policy_of(folder: Path, shape: ModelShape, mesh: Mesh, device: torch.device, precision: str) -> Policy:
    settings = Settings.model_validate(
        {
            "model": {"path": str(folder)},
            "data": {"path": "-"},
            "device": device.type,
            "precision": precision_of(precision),
            "objective": {"clip": None},
            "training": {"tokens_per_microbatch": 8192},
            "optimizer": {"clip_grad": 0.0},
        }
    )
    layout = mapping_for(shape)

    def load(policy: Policy) -> None:
        params = policy.loadable_parameters()
        load_hf_weights(folder, params, layout, tensor=1, tensor_rank=0, vocab_multiple=1)

    return Policy(settings, shape, mesh, device, load)


def numbers(policy: Policy, batch: list[Trajectory]) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs of all response tokens, and the gradient, by parameter: flat, float32, on the CPU."""
    pack = policy.pack(batch)
    (scored,) = policy.logprobs([pack])
    logp = torch.cat([part for _, part in pack.split(scored[0])]).cpu()
    for t, part in pack.split(scored[0]):
        t.old = t.anchor = part.cpu().numpy().copy()
    loss, aggregator = build_loss(policy.settings), build_aggregator(policy.settings)
    with policy.updating():
        policy.update([policy.pack(batch)], loss, aggregator, lr=0.0)
    grads = {_local_name(name): p.main_grad for name, p in policy.named_parameters()}
    return logp, torch.cat([grads[name].flatten().float().cpu() for name in sorted(grads)])


def _local_name(name: str) -> str:
    """What Megatron's own layers call a parameter, whoever's layers it is of."""
    for fused, local in FUSED.items():
        name = name.replace(fused, local)
    return name


def by_transformers(folder: Path, batch: list[Trajectory], device: torch.device) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(device).eval()
    found = []
    with torch.no_grad():
        for t in batch:
            tokens = torch.tensor([*t.prompt.tolist(), *t.response.tolist()], device=device)
            logits = model(tokens[None]).logits[0, len(t.prompt) - 1 : -1].float()
            found.append(logits.log_softmax(-1).gather(1, tokens[len(t.prompt) :, None])[:, 0].cpu())
    return torch.cat(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="0.6b")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--lengths", type=int, nargs="+", default=[100, 1000, 2000])
    recipes = ["blockwise", "tensorwise", "delayed", "blockwise+params", "tensorwise+params"]
    parser.add_argument("--recipes", nargs="*", default=recipes)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    args = parser.parse_args()
    device, mesh = start(args.device)
    shape = replace(SHAPES[args.shape], num_layers=args.layers)
    print(machine(device))
    print(f"{'':<34} {'log-probs: mean':>16} {'largest':>9} {'gradient':>9}")
    with tempfile.TemporaryDirectory() as work:
        folder = write_checkpoint(Path(work) / "model", shape)
        batch = batch_of(args.lengths, shape.vocab_size)
        found = {}
        for name in ("fp32", "bf16", *args.recipes):
            forget()
            policy = policy_of(folder, shape, mesh, device, name)
            found[name] = numbers(policy, batch)
            del policy
        forget()
        found["transformers bf16"] = (by_transformers(folder, batch, device), torch.zeros(0))
    for name, base in (
        ("bf16", "fp32"),
        ("transformers bf16", "fp32"),
        ("bf16", "transformers bf16"),
        *((recipe, "bf16") for recipe in args.recipes),
    ):
        (logp, grad), (other, others) = found[name], found[base]
        gap = (logp - other).abs()
        told = f"{((grad - others).norm() / others.norm()).item():9.1e}" if len(grad) == len(others) else ""
        print(f"{name + ' against ' + base:<34} {gap.mean():16.1e} {gap.max():9.1e} {told:>9}")


if __name__ == "__main__":
    main()
