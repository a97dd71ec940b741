r"""A pretend GPU, for machines without one: it counts launches, waits of the host and live memory.

What     inside `with PretendGPU() as gpu:` tensors on the device "pretend" hold CPU data, and every operation on them
         is computed on the CPU, counted, and checked: two devices in one operation raise, as they do on a GPU. With
         `numbers=False` nothing is computed: tensors have shapes alone, and the largest update takes a second
Why      a GPU of this size of network is as fast as Python launches its kernels, and stands still wherever Python waits
         for a result. Both can be counted without one
Shapes   any
Notes    PyTorch keeps a device type free for backends of others ("PrivateUse1"). Autocast to bfloat16, backward and the
         fused optimizer's step are dispatched as for any GPU. What it cannot show: time, which kernels a GPU would
         choose and what they round, and whether a CUDA graph can be captured
Use      with PretendGPU() as gpu:
             agent, batch = agent.to("pretend"), batch.to("pretend")
             gpu.reset()
             update(agent, ...)
             print(gpu.launches, gpu.waits, gpu.peak)
"""

import contextlib
import sys
import weakref
from collections import Counter
from pathlib import Path
from unittest import mock

import torch
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from agent import Policy

# Operations that only describe memory anew, or allocate it.
VIEWS = """
    view _unsafe_view reshape permute expand slice select squeeze unsqueeze detach alias as_strided
    split unbind t transpose split_with_sizes unfold diagonal empty empty_like new_empty
    empty_strided new_empty_strided _reshape_alias lift_fresh set_ is_same_size _local_scalar_dense
    _fused_sdp_choice chunk transpose_
"""
# Operations whose result has a size that depends on data, or that read a number: the host waits for the device.
WAITS = """
    _local_scalar_dense nonzero masked_select equal unique_consecutive unique_dim _unique2
    unique_dim_consecutive bincount is_nonzero repeat_interleave
"""
VIEWS, WAITS = frozenset(VIEWS.split()), frozenset(WAITS.split())
# Autocast's lists, as far as this project has such operations. Source: PyTorch's documentation of autocast on CUDA.
LOWER = "linear matmul mm addmm bmm baddbmm conv2d scaled_dot_product_attention"
FLOAT32 = (
    "layer_norm group_norm softmax.int log_softmax.int cumsum sum sum.dim_IntList prod pow.Tensor_Scalar"
)
FLOAT32 += (
    " norm.ScalarOpt_dim exp log log1p expm1 binary_cross_entropy_with_logits cross_entropy_loss logsumexp"
)


class PretendTensor(torch.Tensor):
    """A tensor that says it is on the pretend GPU; `data_` holds its numbers."""

    @staticmethod
    def __new__(cls, data):
        return torch.Tensor._make_wrapper_subclass(
            cls,
            data.shape,
            strides=data.stride(),
            storage_offset=data.storage_offset(),
            dtype=data.dtype,
            device="pretend:0",
        )

    def __init__(self, data):
        self.data_ = data

    def tolist(self):
        return self.cpu().tolist()

    def __reduce_ex__(self, protocol):  # a checkpoint is read on a CPU
        return self.data_.clone().__reduce_ex__(protocol)

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise RuntimeError(f"{function} outside of `with PretendGPU()`")


def gru_cell(from_input, from_state, state, bias_input=None, bias_state=None):
    "One step of a GRU, (N, 3 H), (N, 3 H) and (N, H) -> (N, H), and what its backward needs. A GPU has a kernel for it."
    from_input = from_input if bias_input is None else from_input + bias_input
    from_state = from_state if bias_state is None else from_state + bias_state
    (reset_i, update_i, new_i), (reset_s, update_s, new_s) = from_input.chunk(3, -1), from_state.chunk(3, -1)
    reset, update = (reset_i + reset_s).sigmoid(), (update_i + update_s).sigmoid()
    new = (new_i + reset * new_s).tanh()
    return new + update * (state - new), torch.cat([reset, update, new, state, new_s], -1)


def gru_cell_backward(gradient, kept, has_bias):
    "Gradients of `gru_cell`'s arguments."
    reset, update, new, state, new_s = kept.chunk(5, -1)
    at_new = gradient * (1 - update) * (1 - new**2)
    at_update = gradient * (state - new) * update * (1 - update)
    at_reset = at_new * new_s * reset * (1 - reset)
    at_input = torch.cat([at_reset, at_update, at_new], -1)
    at_state = torch.cat([at_reset, at_update, at_new * reset], -1)
    biases = (at_input.sum(0), at_state.sum(0)) if has_bias else (None, None)
    return at_input, at_state, gradient * update, *biases


def attention(query, key, value, is_causal=False):
    "One kernel forward and one backward, as flash attention has."
    if torch.is_autocast_enabled("pretend"):
        query, key, value = (x.to(torch.bfloat16) for x in (query, key, value))
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return flash(query, key, value, is_causal=is_causal)[0]


class Generator(torch.Generator):
    """Random numbers for the pretend GPU, drawn on the CPU."""

    def __new__(cls, device="cpu"):
        return super().__new__(cls, "cpu" if "pretend" in str(device) else device)


class Backend:
    """What PyTorch asks a device's module for."""

    is_available = is_initialized = staticmethod(lambda: True)
    current_device = staticmethod(lambda: 0)
    device_count = staticmethod(lambda: 1)
    _is_in_bad_fork = staticmethod(lambda: False)
    manual_seed_all = staticmethod(lambda seed: None)
    get_amp_supported_dtype = staticmethod(lambda: [torch.bfloat16])


def register() -> None:
    """Name the free device type "pretend", with autocast's rules. Once a process."""
    if hasattr(torch, "pretend"):
        return
    _setup_privateuseone_for_python_backend("pretend", backend_module=Backend)
    every, aten = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    every.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    for names, dtype in ((LOWER, torch.bfloat16), (FLOAT32, torch.float32)):
        for name in names.split():
            packet, overload = (name.split(".") + ["default"])[:2]
            kernel = cast_first(getattr(getattr(torch.ops.aten, packet), overload), dtype)
            aten.impl(name, kernel, "AutocastPrivateUse1")
    register.libraries = every, aten  # they hold for as long as these objects live


def cast_first(operation, dtype):
    "`operation` on arguments in `dtype`, without autocast inside."
    autocast = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)

    def kernel(*args, **kwargs):
        is_float = lambda x: (
            isinstance(x, torch.Tensor) and x.is_floating_point() and x.dtype != torch.float64
        )
        cast = lambda x: x.to(dtype) if is_float(x) else x
        with torch._C._ExcludeDispatchKeyGuard(autocast):
            return operation(*tree_map(cast, args), **kwargs)

    return kernel


class PretendGPU(TorchDispatchMode):
    """Computes, counts and checks operations on the device "pretend".

    `launches` and `waits` count operations since `reset`, by name and by (name, line); `live` and `peak` are bytes of
    tensors. Copies to the device that do not block are in `copies`.
    """

    def __init__(self, numbers: bool = True):
        super().__init__()
        register()
        self.device = torch.device("cpu" if numbers else "meta")
        self.live, self.sizes = 0, {}
        self.reset()

    def reset(self) -> None:
        """Begin to count anew."""
        self.by_name, self.waits_at, self.copies, self.peak = Counter(), Counter(), 0, self.live

    @property
    def launches(self) -> int:
        """Operations that launch a kernel (some launch more than one)."""
        return sum(self.by_name.values())

    @property
    def waits(self) -> int:
        """Times that the host waited for the device."""
        return sum(self.waits_at.values())

    def __enter__(self):
        supported = lambda *arguments: True
        self.patches = contextlib.ExitStack()
        for target, value in {
            "torch.Generator": Generator,
            # In inference mode, tensors have no versions, which these need.
            "agent.Policy.__call__": torch.no_grad()(Policy.__call__.__wrapped__),
            "torch.nn.functional.scaled_dot_product_attention": attention,
            # Many-tensor operations ask for plain tensors.
            "torch.utils._foreach_utils._has_foreach_support": supported,
            "torch.nn.utils.clip_grad._has_foreach_support": supported,
        }.items():
            self.patches.enter_context(mock.patch(target, value))
        was = torch.__future__.get_overwrite_module_params_on_conversion()
        torch.__future__.set_overwrite_module_params_on_conversion(True)
        self.patches.callback(torch.__future__.set_overwrite_module_params_on_conversion, was)
        return super().__enter__()

    def __exit__(self, *error):
        self.patches.close()
        return super().__exit__(*error)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs, name = dict(kwargs or {}), function._schema.name.removeprefix("aten::")
        # In inference mode, operations arrive whole that are made of others.
        if torch._C._dispatch_has_kernel_for_dispatch_key(function.name(), "CompositeImplicitAutograd"):
            with self:
                return function.decompose(*args, **kwargs)
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        ours = [x for x in tensors if isinstance(x, PretendTensor)]
        target = kwargs.get("device")
        if not ours and (target is None or torch.device(target).type != "pretend"):
            return function(*args, **kwargs)
        inside = target is None or torch.device(target).type == "pretend"
        crossing = name in ("_to_copy", "copy_") and (not inside or len(ours) < len(tensors))
        if crossing:
            self.cross(name, args, kwargs, inside)
        else:
            self.check(function, args, tensors, ours)
        self.count(name, args)
        data = {id(x): x.data_ for x in ours}
        plain = lambda x: data.get(id(x), x)
        if not inside:  # to the host
            copy = function(*tree_map(plain, args), **kwargs) if self.device.type == "cpu" else None
            return (
                torch.zeros(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
                if copy is None
                else copy.clone()
            )
        if "device" in kwargs:
            kwargs["device"] = self.device
        function = {"_thnn_fused_gru_cell": gru_cell, "_thnn_fused_gru_cell_backward": gru_cell_backward}.get(
            name, function
        )
        if (
            name == "_fused_adamw_" and self.device.type == "meta"
        ):  # PyTorch has no shapes of it; it is all in place
            return None
        result = function(*tree_map(plain, args), **{key: tree_map(plain, x) for key, x in kwargs.items()})
        if torch.Tag.inplace_view in getattr(function, "tags", ()):  # the tensor's own shape changes, too
            with no_dispatch():
                function(*args, **kwargs)
        back = {id(x.data_): x for x in ours}  # of operations in place
        wrap = lambda x: back.get(id(x)) if id(x) in back else self.wrap(x)
        return tree_map(lambda x: wrap(x) if isinstance(x, torch.Tensor) else x, result)

    def cross(self, name: str, args, kwargs, inside: bool) -> None:
        "Count a copy from one device to the other."
        to_device = inside if name == "_to_copy" else isinstance(args[0], PretendTensor)
        blocks = not (kwargs.get("non_blocking") or (name == "copy_" and len(args) > 2 and args[2]))
        if to_device and not blocks:
            self.copies += 1
        else:
            self.waits_at["copy to the device" if to_device else "copy to the host", self.line()] += 1

    def check(self, function, args, tensors, ours) -> None:
        "Raise RuntimeError where one operation gets tensors of two devices. Numbers () may be on the CPU."
        strangers = [x for x in tensors if not isinstance(x, PretendTensor) and x.ndim]
        if ours and strangers:
            raise RuntimeError(f"{function} got tensors on two devices, at {self.line()}")

    def count(self, name: str, args) -> None:
        "Count a launch or a wait."
        flags = [x for x in tree_leaves(args[1:]) if isinstance(x, torch.Tensor) and x.dtype == torch.bool]
        if name in WAITS or (
            name in ("index", "index_put_", "index_put") and flags
        ):  # x[mask] counts the mask first
            self.waits_at[name, self.line()] += 1
        if name not in VIEWS:
            self.by_name[name] += 1

    def line(self) -> str:
        "The project's line that asked for the operation."
        frame = sys._getframe()
        while frame is not None:
            path = Path(frame.f_code.co_filename)
            if (
                path.is_relative_to(ROOT)
                and "site-packages" not in path.parts
                and path.name != Path(__file__).name
            ):
                return f"{path.name}:{frame.f_lineno}"
            frame = frame.f_back
        return "?"

    def wrap(self, data: torch.Tensor) -> PretendTensor:
        "A tensor on the device; its memory counts as long as it lives."
        storage = data.untyped_storage()
        if (key := storage._cdata) not in self.sizes:
            self.sizes[key] = storage.nbytes()
            self.live += storage.nbytes()
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self.forget, key)
        return PretendTensor(data)

    def forget(self, key: int) -> None:
        "A tensor's memory is free."
        self.live -= self.sizes.pop(key, 0)
