"""A training run before it starts: memory per device, FLOPs, communication and time.

    memory    weights 4, gradients 4 and AdamW's moments 8 bytes per parameter, divided by the devices that share them;
              with bfloat16 autocast 2 more for copies of the weights; with FSDP two gathered blocks, one prefetched;
              activations (activations.py) and logits of a micro-batch of rows / (replicate · shard · expert ·
              accumulate) rows of length / context tokens
    compute   FLOPs of 3 forwards (flops.py), with checkpointing 4, / (devices · FLOP/s · utilization)
    update    28 bytes per parameter, read and written once by the optimizer / bandwidth
    exchange  replicate: an all-reduce of the gradients, 2 (d-1)/d · 4 bytes per parameter
              shard: two all-gathers of the weights and a reduce-scatter of the gradients per micro-batch
              expert: an all-to-all of every token's rows to its experts and back, in forward and backward
              context: a ring of keys and values in forward, of these and their gradients in backward
              tensor: an all-reduce of the residual stream per sublayer, in forward and backward
    step      max(compute, replicate and shard exchange, which overlap with it) + the other exchanges + update

Rajbhandari et al. 2020 (ZeRO); Shoeybi et al. 2019 (tensor parallelism); Korthikanti et al. 2022 (activations);
Lepikhin et al. 2020 (experts); Liu et al. 2023 (ring attention). The roles are those of a recipe's `train.parallel`.
"""

from dataclasses import asdict, dataclass
from functools import cached_property
from math import ceil, prod

from regard.kernels.linear_cross_entropy import CHUNK
from regard.models.base import Model
from regard.models.decoder import Decoder
from regard.models.encoder import Encoder
from regard.models.heads import MaskedLM, PreTraining
from regard.models.stack import unroll
from regard.parts.experts import Experts
from regard.parts.input import Tokens
from regard.planning.activations import activation_memory, block_parameters
from regard.planning.cost import Costs
from regard.planning.model_plan import plan
from regard.planning.parameters import stacks
from regard.planning.scaling import flops_6nd
from regard.planning.speed import Device

UTILIZATION = 0.4  # assumed share of the peak FLOP/s; a compiled model of 124M parameters reached 0.41 on an H200
USABLE = 0.9  # assumed share of a device's memory; the rest is for the allocator and the runtime
UPDATE_BYTES = 28  # float32: read weight, gradient and two moments, write weight and two moments
MAX_DEVICES = 4096
# Bytes per trained parameter of the optimizer's state. Others are planned as AdamW.
STATE_BYTES = {"adamw": 8.0, "muon": 4.0, "adafactor": 0.1, "adamw8bit": 2.1, "sgd": 4.0}


@dataclass(frozen=True)
class ParallelSplit:
    """The number of devices along each dimension of a recipe's `train.parallel`."""

    replicate: int = 1
    shard: int = 1
    expert: int = 1
    context: int = 1
    tensor: int = 1

    def __post_init__(self) -> None:
        for name, size in asdict(self).items():
            if size < 1:
                raise ValueError(f"split: {name}={size} must be at least 1")

    @property
    def devices(self) -> int:
        return prod(asdict(self).values())

    @property
    def row_parts(self) -> int:
        return self.replicate * self.shard * self.expert

    @property
    def shards(self) -> int:
        """Devices over which FSDP shards weights; 1 with DDP, which `replicate` and `context` alone use."""
        return self.shard * self.expert * self.context if max(self.shard, self.expert, self.tensor) > 1 else 1

    @property
    def copies(self) -> int:
        """Devices that hold the same weights."""
        return self.devices // (self.shards * self.tensor)

    @property
    def expert_shards(self) -> int:
        """Devices over which the weights of experts are distributed; `tensor` does not divide them."""
        return self.devices // self.tensor if self.expert > 1 else self.shards

    def __str__(self) -> str:
        return ", ".join(f"{name}={size}" for name, size in asdict(self).items() if size > 1) or "one device"


ONE_DEVICE = ParallelSplit()


@dataclass(frozen=True)
class TrainingJob:
    """A model and the settings on which the costs of training it depend."""

    spec: Model
    rows: int  # per step, on all devices
    length: int  # tokens per row
    steps: int
    accumulate: int = 1
    mixed: bool = False  # bfloat16 autocast
    optimizer: str = "adamw"
    trained: int | None = None  # parameters of adapters, if the model itself is frozen

    def __post_init__(self) -> None:
        for name in ("rows", "length", "steps", "accumulate"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")

    @cached_property
    def costs(self) -> Costs:
        return plan(self.spec, context=self.length, batch=self.rows)

    @property
    def tokens_per_step(self) -> int:
        return self.rows * self.length

    @property
    def tokens(self) -> int:
        return self.steps * self.tokens_per_step

    @property
    def flops_per_token(self) -> int:
        """Frozen weights have no gradients, so their backward is one product of two."""
        return self.costs.training_flops if self.trained is None else self.costs.training_flops * 2 // 3

    @property
    def flops_per_step(self) -> int:
        return self.flops_per_token * self.tokens_per_step

    @property
    def flops(self) -> dict[str, float]:
        """FLOPs of the run: counted, the estimate 6·N·D, and the share of attention that it omits."""
        without_pairs = self.costs.flops(self.length, 0)
        pairs = 3 * (self.costs.flops(self.length, self.length) - without_pairs) / self.length
        return {
            "total": self.flops_per_token * self.tokens,
            "6ND": flops_6nd(self.costs.count.active, self.tokens),
            "of query-key pairs": pairs * self.tokens,
        }

    def micro_rows(self, split: ParallelSplit) -> int:
        """Rows of a micro-batch on one device."""
        return max(1, ceil(self.rows / (split.row_parts * self.accumulate)))

    @cached_property
    def blocks(self) -> list[tuple[int, int, int]]:
        return block_parameters(self.spec)

    @cached_property
    def expert_parameters(self) -> int:
        return sum(experts * times for _, experts, times in self.blocks)

    def local_parameters(self, split: ParallelSplit) -> int:
        """Parameters on one device, before FSDP gathers a block."""
        others = self.costs.parameters - self.expert_parameters
        return ceil(others / (split.shards * split.tensor)) + ceil(self.expert_parameters / split.expert_shards)

    def local_trained(self, split: ParallelSplit) -> int:
        return (
            self.local_parameters(split) if self.trained is None else ceil(self.trained / (split.shards * split.tensor))
        )

    def memory(self, split: ParallelSplit = ONE_DEVICE, checkpointing: bool = False) -> dict[str, int]:
        """Bytes on one device by their use. A process and its libraries are not included."""
        rows, length = self.micro_rows(split), ceil(self.length / split.context)
        local, trained = self.local_parameters(split), self.local_trained(split)
        sizes = {
            "weights": 4 * (local if self.trained is None else local + trained),
            "gradients": 4 * trained,
            "optimizer": int(STATE_BYTES.get(self.optimizer, 8.0) * trained),
        }
        gathered = max(
            ceil((size - experts) / split.tensor) + ceil(experts / split.expert) for size, experts, _ in self.blocks
        )
        if split.shards > 1:
            sizes["gathered blocks"] = 2 * gathered * (2 if self.mixed else 4)
        elif self.mixed:
            sizes["bfloat16 copies"] = 2 * local
        sizes["activations"] = activation_memory(self.spec, rows, length, self.mixed, checkpointing, split.tensor)
        return sizes | {"logits": logit_bytes(self.spec, rows * length, self.mixed) // split.tensor}

    def exchange(self, split: ParallelSplit) -> dict[str, float]:
        """Bytes that one device sends per step, by the role of the split."""
        experts, number = self.expert_parameters, 2 if self.mixed else 4
        gathered = received((self.costs.parameters - experts) / split.tensor, split.shards)
        gathered += received(experts / split.expert, split.expert_shards // split.expert)
        reduced = self.local_trained(split)
        if split.expert > 1 and self.trained is None:
            reduced -= ceil(experts / split.expert_shards)  # these have no copies
        tokens = number * self.tokens_per_step / (split.row_parts * split.context)
        layers = [(block, s.width) for s in stacks(self.spec).values() for block in unroll(s.layers)]
        bodies = [(sublayer.body, width) for block, width in layers for sublayer in block.sublayers]
        routed = sum(body.top_k * width for body, width in bodies if isinstance(body, Experts))
        return {
            "replicate": 2 * 4 * received(reduced, split.copies),
            "shard": gathered * ((4 if self.mixed else 8) + 4) * self.accumulate,
            "expert": 2 * 2 * received(tokens * routed, split.expert),
            "context": 3 * (split.context - 1) * tokens * self.costs.kv_bytes_per_token / 4,
            "tensor": 2 * 2 * received(tokens * sum(width for _, width in bodies), split.tensor),
        }

    def seconds_per_step(
        self,
        device: Device,
        split: ParallelSplit = ONE_DEVICE,
        utilization: float = UTILIZATION,
        checkpointing: bool = False,
    ) -> float:
        """The time of a step. The overhead of launching operations, which bounds small models, is not included."""
        forwards = 4 if checkpointing else 3
        compute = self.flops_per_step * forwards / 3 / (split.devices * device.flops * utilization)
        update = UPDATE_BYTES * self.local_trained(split) / device.bandwidth
        seconds = {name: sent / device.link for name, sent in self.exchange(split).items()}
        overlapping = seconds.pop("replicate") + seconds.pop("shard")
        return max(compute, overlapping) + sum(seconds.values()) + update

    def fits(self, device: Device, split: ParallelSplit = ONE_DEVICE, checkpointing: bool = False) -> bool:
        return sum(self.memory(split, checkpointing).values()) <= USABLE * device.memory

    def smallest_split(self, device: Device, checkpointing: bool = False) -> ParallelSplit | None:
        """The fewest devices (a power of two, sharded, then also split by tensor) on which the run fits; None: none."""
        count = 1
        while count <= MAX_DEVICES:
            shard = min(count, 1 << (self.rows.bit_length() - 1))  # at most one row per shard
            split = ParallelSplit(shard=shard, tensor=count // shard)
            if split.tensor <= 8 and self.fits(device, split, checkpointing):
                return split
            count *= 2
        return None


def received(size: float, devices: int) -> float:
    """The part of `size` that a device receives from the others, if each has an equal share."""
    return size * (devices - 1) / devices


def logit_bytes(spec: Model, tokens: int, mixed: bool) -> int:
    """Bytes of a language model's loss: logits and their gradient for one chunk of tokens, and that of the head."""
    for stack in stacks(spec).values():
        if isinstance(stack, Decoder):
            vocab = stack.vocab
        elif isinstance(stack, Encoder) and isinstance(stack.head, MaskedLM | PreTraining):
            assert isinstance(stack.input, Tokens), "checked by the head"
            vocab = stack.input.vocab
        else:
            continue
        chunk = min(tokens, max(stack.table_dim, CHUNK // vocab))
        return chunk * vocab * (2 if mixed else 8) + 4 * vocab * stack.table_dim
    return 0
