"""Hugging Face's files: written in parallel, read by slices, the same bits as from_pretrained."""

from __future__ import annotations

import ctypes
import importlib.util
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import disttensor as dt
from disttensor import ProcessMesh, Shard
from disttensor.checkpoint.save_pretrained import _size
from tests.checkpoint.test_dcp import peak_while
from tests.checkpoint.test_models import App
from tests.support.layouts import S0, S1, R, counted, grid
from tests.support.pool import on_ranks


def llama(tied: bool = True) -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=31, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=tied,
        )
    ).eval()  # fmt: skip


def same_bits(got: Any, want: nn.Module) -> None:
    theirs = want.state_dict()
    state = got.state_dict()
    assert state.keys() == theirs.keys()
    for name, x in state.items():
        value = x.full_tensor() if isinstance(x, dt.DistTensor) else x
        assert value.dtype == theirs[name].dtype and torch.equal(value, theirs[name]), name


def test_sizes_of_files_in_words() -> None:
    words = ["3KB", "1.5 MB", "2gb", "1TB", 7]
    assert [_size(word) for word in words] == [3000, 1_500_000, 2 * 10**9, 10**12, 7]


@pytest.mark.parametrize(("tied", "size"), [(True, "5GB"), (False, 4000)])
@on_ranks(4)
def test_a_model_of_transformers_goes_out_and_in(tied, size, tmp_path):
    plain, mesh = llama(tied), grid()
    plan = dt.plans.megatron(llama(tied), "tp", mesh)
    model = dt.shard_module(llama(tied), mesh, plan)
    dt.pretrained.save(model, tmp_path, max_shard_size=size)
    files = sorted(p.name for p in tmp_path.glob("*.safetensors*"))
    assert (files == ["model.safetensors"]) is (size == "5GB"), files
    back = AutoModelForCausalLM.from_pretrained(tmp_path)
    same_bits(back, plain)
    assert type(back) is LlamaForCausalLM and back.config.vocab_size == 31

    dist.barrier()
    theirs = tmp_path / "theirs"
    if dist.get_rank() == 0:
        plain.save_pretrained(theirs, max_shard_size=size)
    dist.barrier()
    for folder in (theirs, tmp_path):
        with torch.device("meta"):
            empty = LlamaForCausalLM(plain.config).eval()
        other = ProcessMesh([[3, 2], [0, 1]], ("dp", "tp"))
        loaded = dt.pretrained.load(empty, folder, other, plan)
        same_bits(loaded, plain)
        split = loaded.model.layers[0].mlp.up_proj.weight
        assert split.to_local().shape == (12, 16)
        ids = torch.arange(10).reshape(2, 5)
        want, got = plain(ids).logits, loaded(dt.shard_tensor(ids, other, [R, R])).logits
        torch.testing.assert_close(got.full_tensor(), want)

    # transformers' own writer refuses what is split, and is right where everything is whole
    if size == "5GB":
        with pytest.raises(RuntimeError, match=r"dt\.pretrained\.save\(model, folder\) writes"):
            model.save_pretrained(tmp_path / "split")
        assert not (tmp_path / "split").exists()
        dt.shard_module(llama(tied), mesh, {}).save_pretrained(tmp_path / "whole")
        dist.barrier()
        same_bits(AutoModelForCausalLM.from_pretrained(tmp_path / "whole"), plain)


@pytest.mark.parametrize("name", ["sharding 3", "pp"])
@on_ranks(4)
def test_pieces_of_any_kind_are_written_and_read(name, tmp_path):
    saved, loaded = App(name, steps=1), App(name, steps=1, seed=1)
    dt.pretrained.save(saved.model, tmp_path, names=lambda n: f"model.{n}")
    [file] = tmp_path.glob("*.safetensors")
    stored = safetensors.torch.load_file(file)
    want = {n: dt.broadcast_value(x) for n, x in saved.model.state_dict().items()}
    assert torch.equal(want.pop("head.weight"), want["embed.weight"])  # tied: written once
    assert {n.removeprefix("model.") for n in stored} == want.keys()
    for n, value in want.items():
        assert torch.equal(stored[f"model.{n}"], value), n
    dt.pretrained.load(loaded.model, file, names=lambda n: f"model.{n}")
    for n, x in loaded.model.state_dict().items():
        assert torch.equal(dt.broadcast_value(x), want.get(n, want["embed.weight"])), n


@on_ranks(2)
def test_of_tied_tensors_the_last_counts_as_in_load_state_dict(tmp_path):
    def model() -> Any:
        made = nn.ModuleDict({"embed": nn.Linear(4, 3), "head": nn.Linear(4, 3, bias=False)})
        made["head"].weight = made["embed"].weight
        return made

    state = {n: torch.randn_like(x) for n, x in model().state_dict().items()}
    if dist.get_rank() == 0:
        safetensors.torch.save_file(state, tmp_path / "model.safetensors")
    dist.barrier()
    state = safetensors.torch.load_file(tmp_path / "model.safetensors")
    want, got = model(), dt.shard_module(model(), dt.init_mesh((2,), ("a",)), {"*.weight": [S0]})
    want.load_state_dict(state)
    dt.pretrained.load(got, tmp_path)
    same_bits(got, want)


class Fused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(4, 9), nn.Linear(5, 4, dtype=torch.bfloat16)


@on_ranks(4)
def test_names_are_mapped_and_what_does_not_fit_is_refused_before_anything_changes(tmp_path):
    parts = {n: counted(3, 4, dtype=torch.float32) * i for i, n in enumerate("qkv", 1)}
    parts |= {"b": counted(12, dtype=torch.float32), "o": counted(4, 5), "ob": counted(4)}
    file = tmp_path / "model.safetensors"
    if dist.get_rank() == 0:
        safetensors.torch.save_file(parts, file)
    dist.barrier()
    names = {
        "qkv.weight": ["q", "k", "v"], "qkv.bias": ("b", slice(3, None)),
        "out.weight": "o", "out.bias": "ob",
    }  # fmt: skip
    qkv = torch.cat([parts["q"], parts["k"], parts["v"]])
    for places in ([S0, S1], [S1, S0], [S0, S0], [R, Shard(0)]):
        model = dt.shard_module(Fused(), grid(), {"*.weight": places, "*.bias": [R, S0]})
        for how in (names, names.get):
            dt.pretrained.load(model, tmp_path, names=how)
            assert torch.equal(model.qkv.weight.full_tensor(), qkv)
            assert torch.equal(model.qkv.bias.full_tensor(), parts["b"][3:])
            assert torch.equal(model.out.weight.full_tensor(), parts["o"].bfloat16())
    before = {n: x.to_local().clone() for n, x in model.state_dict().items()}
    cut = tmp_path / f"cut {dist.get_rank()}"
    cut.write_bytes(file.read_bytes()[:-4])
    for what, files, said in (
        ({}, tmp_path, r"lack .*qkv.weight.* of 4"),
        (names | {"out.bias": "b"}, file, r"'out.bias' is \[4\] in the model, and \[12\]"),
        (names | {"qkv.weight": ["q", "k"]}, file, r"'qkv.weight' is \[9, 4\].*\[6, 4\]"),
        (names | {"out.bias": ("b", slice(4))}, file, r"the model has no \['ob'\] of 1"),
        (names | {"out.bias": ("b", slice(0, 4, 2))}, file, "a slice without a step"),
        (names | {"out.bias": ("b", slice(9, 0, -1))}, file, "a slice without a step"),
        (names | {"out.bias": ("b", 3)}, file, "a slice without a step"),
        (names | {"out.bias": ("b", slice(5, 2))}, file, r"\[4\] in the model, and \[0\]"),
        (names, cut, "is not whole"),
        (names, [tmp_path / "no"], "no"),
    ):
        with pytest.raises((ValueError, FileNotFoundError), match=said):
            dt.pretrained.load(model, files, names=what)
    for n, x in model.state_dict().items():
        assert torch.equal(x.to_local(), before[n])
    with torch.device("meta"):
        empty = Fused()
    with pytest.raises(ValueError, match="on the meta device; give mesh="):
        dt.pretrained.load(empty, file, names=names)
    model.odd = nn.Parameter(dt.zeros(2, mesh=grid(), dtype=torch.complex128))
    with pytest.raises(ValueError, match="no name for"):
        dt.pretrained.save(model, tmp_path)
    del model.odd
    blocked = tmp_path / "file"
    if dist.get_rank() == 0:
        blocked.write_text("no folder")
    with pytest.raises(OSError, match=r"not saved \(rank 0\): FileExistsError"):
        dt.pretrained.save(model, blocked)
    assert [p.name for p in tmp_path.glob("*.safetensors")] == ["model.safetensors"]


@on_ranks(2)
@pytest.mark.parametrize("name", ["own", "who", "group"])
def test_a_regular_tensor_of_any_name_is_compared(tmp_path, name):
    model = nn.Module()
    model.register_buffer(name, torch.full((3,), float(dist.get_rank())))
    with pytest.raises(dt.errors.MismatchError, match=f"{name} differs between the ranks"):
        dt.pretrained.save(model, tmp_path)


@on_ranks(4)
def test_a_rank_never_holds_the_model(tmp_path):
    """Tensors of 32 MiB in pieces of 8: to write, the rows that a rank has of one; to read them,
    nothing beside the pieces, or a buffer where columns are read."""
    mesh = ProcessMesh(range(4), ("x",))
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Linear(2048, 4096, bias=False) for _ in range(4)])
    plan = {"0.*": [S0], "1.*": [S1], "2.*": [S0], "3.*": [S1]}
    dt.shard_module(model, mesh, plan)
    dt.pretrained.save(model, tmp_path)  # and what is imported for it
    writing = peak_while(lambda: dt.pretrained.save(model, tmp_path))
    wanted = [p.detach().clone() for p in model.parameters()]
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    reading = peak_while(lambda: dt.pretrained.load(model, tmp_path))
    assert writing < 28 * 2**20 and reading < 20 * 2**20, (writing / 2**20, reading / 2**20)
    for p, want in zip(model.parameters(), wanted, strict=True):
        assert torch.equal(p.to_local(), want.to_local())


TRAINERS = pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("accelerate", "peft"))),
    reason="peft or accelerate is not installed",
)


@TRAINERS
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # PEFT asks for it
@pytest.mark.parametrize("split", [False, True])
@on_ranks(2, timeout=120)
def test_accelerate_and_peft_write_what_is_whole_and_refuse_what_is_split(split, tmp_path):
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    from peft import LoraConfig, PeftModel, get_peft_model

    def tuned() -> Any:
        lora = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
        return get_peft_model(llama(False), lora)

    plain, mesh = tuned(), ProcessMesh([0, 1], ("tp",))
    plan = {"*q_proj.base_layer.weight": [S0], "*.lora_B.*": [S0]} if split else {}
    model = dt.shard_module(tuned(), mesh, plan)
    accelerator = Accelerator(cpu=True)
    accelerator._models.append(model)  # as ``prepare`` does, without DDP around it
    rank = dist.get_rank()
    writers = {
        "peft": model.save_pretrained,
        "model": lambda folder: accelerator.save_model(model, folder),
        "state": accelerator.save_state,
    }
    try:
        for name, write in writers.items():
            folder = tmp_path / f"{name}{rank}"  # some write on one rank, some on all
            if split:
                refused = RuntimeError, ctypes.ArgumentError
                with pytest.raises(refused, match=r"dt\.(pretrained\.save|Checkpointer)"):
                    write(folder)
                assert not [p for p in folder.rglob("*") if p.suffix in (".safetensors", ".bin")]
                continue
            write(folder)
            dist.barrier()
            if name == "peft":
                same_bits(PeftModel.from_pretrained(llama(False), tmp_path / "peft0"), plain)
                continue
            found = safetensors.torch.load_file(tmp_path / f"{name}0" / "model.safetensors")
            assert found.keys() == plain.state_dict().keys()
            for key, x in plain.state_dict().items():
                assert torch.equal(found[key], x), key
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
