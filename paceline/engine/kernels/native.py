"""The lean forward through the native kernels, on a CPU, the whole step in one call.

Linear layers are float32, or, where asked for and possible, ``w4a8``: the weights' own blocks of 4 or 8 bits times inputs
rounded to 8 bits, and to 16 in the layers that need it (the arithmetic is written down in ``integer.h``), with keys and
values kept as float16: at a context of a thousand tokens they are a third of what a step reads. All else is
float32 in both. The structures mirror those of ``interface.h``.
"""

import contextlib
import ctypes
import mmap
from collections.abc import Sequence
from ctypes import POINTER, Structure, c_float, c_int, c_int64, c_void_p, pointer

import numpy as np
import torch

from paceline.engine.kernels.build import Library
from paceline.engine.kv import SlotKV
from paceline.engine.lean_weights import Checkpoint, LayerWeights, Projection, Shape, Unsuitable, join
from paceline.engine.packing import Segment, check_segments
from paceline.sampling import largest

PANEL = 32
"""Outputs that lie side by side in memory."""
_HALF = PANEL // 2
_BLOCK = 32
"""Inputs that share a scale in the formats of blocks."""
_FLOAT32, _BFLOAT16, _BLOCKS_4, _BLOCKS_8, _INTEGERS_4, _INTEGERS_8, _FINE_4, _FINE_8 = range(8)
_WHOLE = {2: torch.int16, 4: torch.int32}
"""Integers as long as a number of the embedding, by bytes: numpy knows no bfloat16."""
_STORED = {
    _FLOAT32: "float32",
    _BFLOAT16: "bfloat16",
    _BLOCKS_4: "4-bit blocks",
    _BLOCKS_8: "8-bit blocks",
    _INTEGERS_4: "4-bit blocks",
    _INTEGERS_8: "8-bit blocks",
    _FINE_4: "4-bit blocks",
    _FINE_8: "8-bit blocks",
}


class _Linear(Structure):
    _fields_ = (
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("inputs", c_int64),
        ("outputs", c_int64),
        ("format", c_int64),
    )


class _Layer(Structure):
    _fields_ = (
        ("attention_norm", c_void_p),
        ("mlp_norm", c_void_p),
        ("query_norm", c_void_p),
        ("key_norm", c_void_p),
        ("qkv", _Linear),
        ("attention_out", _Linear),
        ("gate_up", _Linear),
        ("down", _Linear),
    )


class _Model(Structure):
    _fields_ = (
        ("layers", POINTER(_Layer)),
        ("final_norm", c_void_p),
        ("cosines", c_void_p),
        ("sines", c_void_p),
        ("head", _Linear),
        ("num_layers", c_int64),
        ("hidden", c_int64),
        ("intermediate", c_int64),
        ("heads", c_int64),
        ("kv_heads", c_int64),
        ("head_size", c_int64),
        ("epsilon", c_float),
        ("scaling", c_float),
        ("half_kv", c_int64),
    )


class _Batch(Structure):
    _fields_ = (
        ("hidden", c_void_p),
        ("positions", c_void_p),
        ("slot_rows", c_void_p),
        ("wanted", c_void_p),
        ("logits", c_void_p),
        ("best", c_void_p),
        ("top", c_void_p),
        ("keys", c_void_p),
        ("values", c_void_p),
        ("storage_rows", c_int64),
        ("rows", c_int64),
        ("num_wanted", c_int64),
        ("num_layers", c_int64),
    )


class _Arena:
    """Memory for weights in large pages: they are read from end to end in every step."""

    _REGION = 64 << 20
    _PAGE = 2 << 20
    _ALIGNMENT = 64

    def __init__(self) -> None:
        self._region = torch.empty(0, dtype=torch.uint8)
        self.used = 0

    def put(self, values: torch.Tensor) -> torch.Tensor:
        """A contiguous copy of ``values``."""
        return self.take(values.nbytes).view(values.dtype).view(values.shape).copy_(values)

    def take(self, count: int) -> torch.Tensor:
        """``count`` bytes."""
        size = -(-count // self._ALIGNMENT) * self._ALIGNMENT
        if size > len(self._region):
            # Private: most systems have no large pages for memory that could be shared, which is mmap's default.
            memory = mmap.mmap(
                -1, max(size, self._REGION) + self._PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            )
            with contextlib.suppress(AttributeError, OSError):  # a system without large pages
                memory.madvise(mmap.MADV_HUGEPAGE)
            region = torch.frombuffer(memory, dtype=torch.uint8)
            self._region = region[-region.data_ptr() % self._PAGE :]  # from the edge of a large page on
        self.used += count
        taken, self._region = self._region[:count], self._region[size:]
        return taken


class NativeBody:
    """The weights of one model, laid out for the kernels, and its forward. For one thread at a time."""

    def __init__(
        self,
        library: Library,
        checkpoint: Checkpoint,
        shape: Shape,
        vocab_size: int,
        rope: tuple[torch.Tensor, torch.Tensor],
        *,
        integers: bool = False,
    ) -> None:
        """``integers``: w4a8 linear layers, all of them.

        Raises Unsuitable for weights that are missing or too many, for sizes that the kernels do not have, and for
        ``integers`` where the processor or the weights do not allow them.
        """
        self._library = library.functions
        self._library.paceline_make.restype = c_void_p
        self._library.paceline_make.argtypes = (POINTER(_Model), c_int64, c_int)
        self._library.paceline_forward.argtypes = (c_void_p, POINTER(_Batch))
        self._library.paceline_free.argtypes = (c_void_p,)
        self._library.paceline_can_attend.argtypes = (c_int64,)
        self._library.paceline_block_bytes.argtypes = (c_int64,)
        self._library.paceline_block_bytes.restype = c_int64
        self._library.paceline_pack.argtypes = (c_int64, c_void_p, c_int64, c_int64, c_void_p)
        if not self._library.paceline_can_attend(shape.head_size):
            raise Unsuitable(f"the native kernels have no attention for heads of size {shape.head_size}")
        if shape.hidden % _HALF or shape.intermediate % _HALF:
            raise Unsuitable(f"the native kernels need sizes that are multiples of {_HALF}")
        self._integers = integers
        self.precision = "w4a8" if integers else "float32"
        self.kv_dtype = torch.float16 if integers else torch.float32
        if integers and not self._library.paceline_block_bytes(_INTEGERS_4):
            raise Unsuitable("this processor has no AVX2 instructions")
        self._kept: list[torch.Tensor] = []  # what the engine points to
        self._arena = _Arena()
        self._formats: set[int] = set()
        layers = (_Layer * shape.layers)()
        for layer, weights in zip(layers, checkpoint.layers(shape), strict=True):
            self._fill(layer, weights)
        # Mapped anew: pages of the packed weights are let go with the old mapping, and only rows in use come back.
        embedding = checkpoint.reopened().embedding(vocab_size, shape.hidden)
        # numpy takes rows in this thread; torch wakes its own threads from six on, which then spin on the cores that
        # ours compute on: a step of six rows took 2 ms longer.
        self._embedding = embedding.view(_WHOLE[embedding.element_size()]).numpy()
        self._embedding_type = embedding.dtype
        self._head_outputs = vocab_size
        self._model = _Model(
            layers=layers,
            final_norm=self._vector(checkpoint.final_norm(shape.hidden)),
            cosines=self._vector(rope[0]),
            sines=self._vector(rope[1]),
            head=self._linear(Projection(checkpoint.head(shape, vocab_size), None), fine=True),
            num_layers=shape.layers,
            hidden=shape.hidden,
            intermediate=shape.intermediate,
            heads=shape.heads,
            kv_heads=shape.kv_heads,
            head_size=shape.head_size,
            epsilon=shape.epsilon,
            scaling=shape.head_size**-0.5,
            half_kv=integers,
        )
        capacity = len(rope[0])
        self._engine = self._library.paceline_make(pointer(self._model), capacity, torch.get_num_threads())
        self.weight_bytes = self._arena.used
        """Read in every step that gives logits."""
        stored = " and ".join(dict.fromkeys(_STORED[kind] for kind in sorted(self._formats)))
        inputs = (
            ", inputs of linear layers in blocks of 8 and 16 bits, keys and values in float16"
            if integers
            else ""
        )
        self.kernels = f"{library.name}, weights kept exactly in {stored}{inputs}"

    def __del__(self) -> None:
        engine = getattr(self, "_engine", None)
        if engine is not None:
            self._library.paceline_free(engine)

    def forward(self, segments: Sequence[Segment], kv: SlotKV, layers: int) -> torch.Tensor:
        """Logits [sum of num_logits, V] after the first ``layers`` layers; writes the KV rows, moves no length."""
        check_segments(segments, kv)
        token_ids: list[int] = []
        positions: list[int] = []
        slot_rows: list[int] = []
        wanted: list[int] = []
        for segment in segments:
            token_ids += segment.token_ids
            positions += range(segment.start, segment.end)
            slot_rows += [kv.row(segment.slot, 0)] * (segment.end - segment.start)
            wanted += range(len(token_ids) - segment.num_logits, len(token_ids))
        indices = [np.array(values, dtype=np.int64) for values in (positions, slot_rows, wanted)]
        rows = self._embedding.take(token_ids, axis=0)
        hidden = torch.from_numpy(rows).view(self._embedding_type).float()
        logits = torch.empty(len(wanted), self._head_outputs)
        best, top = np.empty(len(wanted), np.int64), np.empty(len(wanted), np.float32)
        batch = _Batch(
            hidden=hidden.data_ptr(),
            positions=indices[0].ctypes.data,
            slot_rows=indices[1].ctypes.data,
            wanted=indices[2].ctypes.data,
            logits=logits.data_ptr(),
            best=best.ctypes.data,
            top=top.ctypes.data,
            keys=kv.keys.data_ptr(),
            values=kv.values.data_ptr(),
            storage_rows=kv.keys.shape[1],
            rows=len(token_ids),
            num_wanted=len(wanted),
            num_layers=layers,
        )
        self._library.paceline_forward(self._engine, pointer(batch))
        largest.tell(logits, best.tolist(), top.tolist())
        return logits

    def _fill(self, layer: _Layer, weights: LayerWeights) -> None:
        # Which inputs are fine is measured: see decision record 0003 and benchmarks/precision.py.
        layer.attention_norm = self._vector(weights.attention_norm)
        layer.mlp_norm = self._vector(weights.mlp_norm)
        layer.query_norm = self._optional(weights.query_norm)
        layer.key_norm = self._optional(weights.key_norm)
        layer.qkv = self._linear(weights.query, weights.key, weights.value, fine=True)
        layer.attention_out = self._linear(weights.attention_out)
        layer.gate_up = self._gate_up(weights.gate, weights.up)
        layer.down = self._linear(weights.down, fine=True)

    def _gate_up(self, gate: Projection, up: Projection) -> _Linear:
        """Sixteen gates, then their sixteen ups: one panel has all it takes to multiply them."""
        joined = join([gate, up], _common_type(gate.weight))

        def interleave(both: torch.Tensor) -> torch.Tensor:
            return both.view(2, -1, _HALF, *both.shape[1:]).transpose(0, 1).reshape(both.shape)

        bias = None if joined.bias is None else interleave(joined.bias)
        return self._linear(Projection(interleave(joined.weight), bias))

    def _linear(self, *parts: Projection, fine: bool = False) -> _Linear:
        """``fine``: 16 bits for the inputs where they are integers."""
        joined = join(list(parts), _common_type(*(part.weight for part in parts)))
        outputs, inputs = joined.weight.shape
        kind, panels = self._panels(joined.weight, fine=fine)
        self._formats.add(kind)
        bias = None
        if joined.bias is not None:
            bias = self._vector(torch.nn.functional.pad(joined.bias.float(), (0, -outputs % PANEL)))
        return _Linear(weight=panels, bias=bias, inputs=inputs, outputs=outputs, format=kind)

    def _panels(self, weight: torch.Tensor, *, fine: bool) -> tuple[int, int]:
        """Format and address of ``weight`` in the smallest form from which every number comes back bit for bit."""
        if self._integers:
            kinds = (_FINE_4, _FINE_8) if fine else (_INTEGERS_4, _INTEGERS_8)
            kind, panels = self._blocks(weight.float(), kinds)
            if panels is None:
                raise Unsuitable("its weights are not all in blocks of 4 or 8 bits")
            return kind, panels
        if weight.dtype == torch.bfloat16:
            return _BFLOAT16, self._keep(self._arena.put(_panels(weight)))
        kind, panels = self._blocks(weight, (_BLOCKS_4, _BLOCKS_8))
        return (_FLOAT32, self._keep(self._arena.put(_panels(weight)))) if panels is None else (kind, panels)

    def _blocks(self, weight: torch.Tensor, kinds: Sequence[int]) -> tuple[int, int | None]:
        """The first of ``kinds`` that holds ``weight`` exactly, and the address of its blocks; None if none does."""
        outputs, inputs = weight.shape
        weight = weight.contiguous()
        for kind in kinds if inputs % _BLOCK == 0 else ():
            size = -(-outputs // PANEL) * (inputs // _BLOCK) * self._library.paceline_block_bytes(kind)
            blocks = torch.empty(size, dtype=torch.uint8)
            if self._library.paceline_pack(kind, weight.data_ptr(), inputs, outputs, blocks.data_ptr()):
                return kind, self._keep(self._arena.put(blocks))
        return _FLOAT32, None

    def _vector(self, values: torch.Tensor) -> int:
        return self._keep(values.to(torch.float32, copy=True).contiguous())

    def _optional(self, values: torch.Tensor | None) -> int | None:
        return None if values is None else self._vector(values)

    def _keep(self, tensor: torch.Tensor) -> int:
        self._kept.append(tensor)
        return tensor.data_ptr()


def _panels(weight: torch.Tensor) -> torch.Tensor:
    """[panels, inputs, 32], the last panel padded with zeros."""
    outputs, inputs = weight.shape
    padded = torch.nn.functional.pad(weight, (0, 0, 0, -outputs % PANEL))
    return padded.view(-1, PANEL, inputs).transpose(1, 2)


def _common_type(*weights: torch.Tensor) -> torch.dtype:
    """bfloat16 where the checkpoint has nothing else: it comes back exactly, and half as much has to be read."""
    return torch.bfloat16 if all(weight.dtype == torch.bfloat16 for weight in weights) else torch.float32


assert ctypes.sizeof(c_void_p) == 8, "the kernels know 64-bit machines only"
