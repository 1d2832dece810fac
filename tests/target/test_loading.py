"""A folder loads, or one line says which file or key is wrong, what was found and what was expected; nothing runs."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

import mlx_dflash
from mlx_dflash.errors import CheckpointError, ConfigError, MlxDflashError, ModelNotFoundError, UnsupportedError
from mlx_dflash.target import Target, end_tokens, load_target
from tests.tiny_models import (
    config_of,
    save_model_folder,
    tiny_gemma4,
    tiny_gpt_oss,
    tiny_llama,
    tiny_llama4,
    tiny_mistral3,
    tiny_qwen3_moe,
)

IDS = mx.array([[7, 8, 9, 30]])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_model_folder(tiny_llama(), None, tmp_path / "tiny")


def edit(path: Path, **keys: Any) -> None:
    content = json.loads(path.read_text())
    content.update(keys)
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


def greedy(target: Target, count: int = 12) -> list[int]:
    caches, ids, said = target.make_caches(), IDS, []
    for _ in range(count):
        ids = mx.argmax(target.forward(ids, caches)[0][:, -1:], axis=-1)
        said.append(ids.item())
    return said


@pytest.mark.parametrize("make", [tiny_llama, tiny_qwen3_moe, tiny_gemma4, tiny_gpt_oss, tiny_mistral3, tiny_llama4])
def test_a_saved_model_comes_back_with_the_same_logits(make: Callable[[], Any], tmp_path: Path) -> None:
    model = make()
    path = save_model_folder(model, None, tmp_path)
    loaded, tokenizer, config = load_target(path, name="tiny")
    Target(loaded, tokenizer=tokenizer).check((0, 1))
    assert mx.array_equal(loaded(IDS), model(IDS))
    assert config["model_type"] == model.model_type
    assert tokenizer.encode("w20 w21", add_special_tokens=False) == [20, 21]


def test_the_bundled_target_loads_and_passes_its_check() -> None:
    path = Path(mlx_dflash.__path__[0]) / "data" / "pair" / "target"
    model, tokenizer, config = load_target(path, name="bundled")
    target = Target(model, name="bundled", tokenizer=tokenizer)
    target.check((-1, 0, target.num_layers - 1))
    assert target.shaping == "softcap 30"
    assert end_tokens(tokenizer, config, path) >= {1, 5}


def test_gemma4_under_its_three_names_gives_the_same_tokens(tmp_path: Path) -> None:
    """R04."""
    texts = {}
    for name in (None, "gemma4", "gemma4_unified"):
        path = save_model_folder(tiny_gemma4(wrapper=name), None, tmp_path / str(name))
        model, tokenizer, _ = load_target(path, name=str(name))
        target = Target(model, tokenizer=tokenizer)
        target.check((0, 2))
        texts[target.model_type] = greedy(target)
    assert list(texts) == ["gemma4_text", "gemma4", "gemma4_unified"]
    assert len({tuple(said) for said in texts.values()}) == 1


def test_a_published_wrapper_with_an_image_tower_loads_its_text_model(tmp_path: Path) -> None:
    model = tiny_gemma4(wrapper="gemma4_unified")
    path = save_model_folder(model, None, tmp_path)
    weights = mx.load(str(path / "model.safetensors"))
    published = {"model." + name.replace("language_model.model.", "language_model."): w for name, w in weights.items()}
    published["model.vision_embedder.patch.weight"] = mx.zeros((4, 4))
    mx.save_safetensors(str(path / "model.safetensors"), published)
    assert mx.array_equal(load_target(path, name="wrapped")[0](IDS), model(IDS))


def test_sharded_weights_load_and_a_missing_shard_is_named(folder: Path) -> None:
    whole = load_target(folder, name="tiny")[0](IDS)
    weights = list(mx.load(str(folder / "model.safetensors")).items())
    (folder / "model.safetensors").unlink()
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    for name, part in zip(names, (weights[:5], weights[5:]), strict=True):
        mx.save_safetensors(str(folder / name), dict(part))
    weight_map = {key: names[i >= 5] for i, (key, _) in enumerate(weights)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert mx.array_equal(load_target(folder, name="tiny")[0](IDS), whole)
    (folder / names[1]).unlink()
    with pytest.raises(
        CheckpointError, match=f"found no {names[1]}, expected the 2 files that model.safetensors.index"
    ):
        load_target(folder, name="tiny")


def code_that_writes(marker: Path) -> str:
    return f"open({str(marker)!r}, 'w').close()\nfrom mlx_lm.models.llama import Model, ModelArgs\n"


REMOTE_CODE = {
    "config.json: model_file": ("config.json", {"model_file": "evil.py"}),
    "config.json: auto_map": ("config.json", {"auto_map": {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"}}),
    "config.json: text_config.auto_map": ("config.json", {"text_config": {"auto_map": {"AutoConfig": "evil.C"}}}),
    "tokenizer_config.json: auto_map": ("tokenizer_config.json", {"auto_map": {"AutoTokenizer": ["evil.T", None]}}),
}


@pytest.mark.parametrize("where", REMOTE_CODE)
def test_a_checkpoint_that_names_code_is_refused_and_its_code_does_not_run(where: str, folder: Path) -> None:
    """R19."""
    file, keys = REMOTE_CODE[where]
    (folder / "evil.py").write_text(code_that_writes(folder / "marker"))
    edit(folder / file, **keys)
    with pytest.raises(CheckpointError) as refusal:
        load_target(folder, name="evil", tokenizer_config={"trust_remote_code": True})
    assert f"keys that name Python code to run: {where};" in str(refusal.value)
    assert not (folder / "marker").exists()


def test_trusted_code_runs(folder: Path) -> None:
    (folder / "own.py").write_text(code_that_writes(folder / "marker"))
    edit(folder / "config.json", model_file="own.py")
    load_target(folder, name="own", trust_remote_code=True)
    assert (folder / "marker").exists()


def test_an_unknown_family_is_named_with_those_that_exist(folder: Path) -> None:
    """R04."""
    edit(folder / "config.json", model_type="cache")
    with pytest.raises(UnsupportedError) as refusal:
        load_target(folder, name="tiny")
    message = str(refusal.value)
    assert "config.json: model_type: found 'cache', expected one of the " in message
    assert all(f" {family}," in message for family in ("llama", "mistral", "gemma4_unified", "qwen3_5_moe"))
    assert "\n" not in message


Damage = Callable[[Path], object]


def write(name: str, content: str | bytes) -> Damage:
    data = content if isinstance(content, bytes) else content.encode()
    return lambda folder: (folder / name).write_bytes(data)


def remove(name: str) -> Damage:
    return lambda folder: (folder / name).unlink()


def config(**keys: Any) -> Damage:
    return lambda folder: edit(folder / "config.json", **keys)


def weights(change: Callable[[dict[str, mx.array]], object]) -> Damage:
    def apply(folder: Path) -> None:
        tensors = mx.load(str(folder / "model.safetensors"))
        change(tensors)
        mx.save_safetensors(str(folder / "model.safetensors"), tensors)

    return apply


def truncate(size: int) -> Damage:
    def apply(folder: Path) -> None:
        data = (folder / "model.safetensors").read_bytes()
        (folder / "model.safetensors").write_bytes(data[:size])

    return apply


def only_pickles(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def safetensors(header: Any, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


W = "model.safetensors"
NORM = "model.norm.weight"
ADVERSARIAL: dict[str, tuple[Damage, type[MlxDflashError], str]] = {
    "no config": (remove("config.json"), CheckpointError, "found no config.json, expected a model folder"),
    "config cut short": (write("config.json", '{\n "a": '), ConfigError, "config.json: line 2, column 7: invalid JSON"),
    "config is a list": (write("config.json", "[1]"), ConfigError, "config.json: found list, expected a JSON object"),
    "config is binary": (write("config.json", b"\xff\xfe\x00"), ConfigError, "config.json: found no readable JSON"),
    "config nested too deep": (write("config.json", "[" * 9**6), ConfigError, "config.json: found no readable JSON"),
    "no model type": (
        config(model_type=None),
        ConfigError,
        "model_type: found None, expected the name of a model family",
    ),
    "model type is a path": (config(model_type="../../evil"), UnsupportedError, "model_type: found '../../evil'"),
    "key missing": (
        config(hidden_size=None),
        ConfigError,
        "'hidden_size': not found, expected what model_type 'llama'",
    ),
    "layers beyond belief": (
        config(num_hidden_layers=10**9),
        ConfigError,
        "num_hidden_layers: found 1000000000, expected",
    ),
    "width is text": (config(hidden_size="32"), ConfigError, "hidden_size: found '32', expected 1 .. "),
    "no heads": (config(num_attention_heads=0), ConfigError, "num_attention_heads: found 0, expected 1 .. "),
    "a rope nobody knows": (
        config(rope_scaling={"rope_type": "odd", "factor": 2.0}),
        CheckpointError,
        "mlx-lm could not build the model from",
    ),
    "generation config broken": (write("generation_config.json", "{"), ConfigError, "generation_config.json: line 1"),
    "weights missing": (remove(W), CheckpointError, "found no model*.safetensors, expected weights beside config.json"),
    "weights are pickles": (only_pickles, CheckpointError, "the target's weights only as pickle (pytorch_model.bin)"),
    "weights empty": (truncate(0), CheckpointError, "model.safetensors: found 0 bytes, expected a safetensors file"),
    "header cut": (truncate(100), CheckpointError, "model.safetensors: found 100 bytes, expected at least "),
    "data cut": (truncate(20_000), CheckpointError, "model.safetensors: found 20000 bytes, expected "),
    "weights are an LFS pointer": (
        write(W, "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"),
        CheckpointError,
        "found a Git LFS pointer",
    ),
    "weights are something else": (write(W, b"\xff" * 64), CheckpointError, "expected a safetensors file"),
    "header is no JSON": (write(W, safetensors(b"{nope}")), CheckpointError, "a header that is not JSON"),
    "offsets lie": (
        write(W, safetensors({NORM: {"dtype": "F32", "shape": [32], "data_offsets": [0, 4]}}, b"1234")),
        CheckpointError,
        f"tensor {NORM}: found 4 bytes, expected 128 for F32 [32]",
    ),
    "dtype unknown": (
        write(W, safetensors({NORM: {"dtype": "Q5", "shape": [1], "data_offsets": [0, 4]}}, b"1234")),
        CheckpointError,
        f"tensor {NORM}: found dtype 'Q5'",
    ),
    "negative shape": (
        write(W, safetensors({NORM: {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}, b"1234")),
        CheckpointError,
        f"tensor {NORM}: found shape [-1]",
    ),
    "index broken": (write(f"{W}.index.json", "{"), CheckpointError, "index.json: found no valid JSON"),
    "index without a map": (write(f"{W}.index.json", "{}"), CheckpointError, "weight_map: found NoneType"),
    "index points outside": (
        write(f"{W}.index.json", '{"weight_map": {"a": "../../secret.safetensors"}}'),
        CheckpointError,
        "found no ../../secret.safetensors",
    ),
    "tensor missing": (
        weights(lambda tensors: tensors.pop(NORM)),
        CheckpointError,
        f"found no tensors for 1 weights of the model, expected {NORM}",
    ),
    "tensor too many": (
        weights(lambda tensors: tensors.update({"model.extra": mx.zeros(1)})),
        CheckpointError,
        "found 1 tensors that the model has no place for: model.extra",
    ),
    "many tensors missing": (
        weights(lambda tensors: [tensors.pop(name) for name in list(tensors)[:8]]),
        CheckpointError,
        " and 4 more",
    ),
    "tensor of another shape": (
        weights(lambda tensors: tensors.update({NORM: mx.zeros(31)})),
        CheckpointError,
        f"tensor {NORM}: found shape (31,), expected (32,)",
    ),
    "no tokenizer": (remove("tokenizer.json"), CheckpointError, "found no tokenizer, expected tokenizer.json or"),
    "tokenizer broken": (write("tokenizer.json", "{]"), ConfigError, "tokenizer.json: line 1, column 2: invalid JSON"),
    "tokenizer empty": (write("tokenizer.json", "{}"), CheckpointError, "the tokenizer in "),
    "tokenizer config broken": (write("tokenizer_config.json", "nul"), ConfigError, "tokenizer_config.json: line 1"),
}


@pytest.mark.parametrize("what", ADVERSARIAL)
def test_a_broken_folder_is_refused_in_one_line_that_names_the_cause(what: str, folder: Path) -> None:
    damage, kind, reason = ADVERSARIAL[what]
    damage(folder)
    with pytest.raises(MlxDflashError) as refusal:
        load_target(folder, name="tiny")
    message = str(refusal.value)
    assert reason in message
    assert type(refusal.value) is kind
    assert "\n" not in message and len(message) < 3000


def test_a_folder_that_is_not_there_is_said_to_be_missing(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"tiny: found no folder .*nowhere"):
        load_target(tmp_path / "nowhere", name="tiny")


def test_an_adapter_changes_the_model_and_one_that_does_not_fit_is_named(folder: Path, tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    settings = {"num_layers": 1, "lora_parameters": {"rank": 2, "scale": 8.0, "dropout": 0.0}}
    (adapter / "adapter_config.json").write_text(json.dumps(settings))
    with pytest.raises(CheckpointError, match=r"found no adapters\.safetensors, expected an adapter"):
        load_target(folder, name="tiny", adapter_path=adapter)
    prefix = "model.layers.1.self_attn.q_proj."
    lora = {prefix + "lora_a": mx.ones((32, 2)), prefix + "lora_b": mx.ones((2, 32))}
    mx.save_safetensors(str(adapter / "adapters.safetensors"), lora)
    model, tokenizer, _ = load_target(folder, name="tiny", adapter_path=adapter)
    Target(model, tokenizer=tokenizer).check((0, 1))
    assert not mx.allclose(model(IDS), load_target(folder, name="tiny")[0](IDS))
    mx.save_safetensors(str(adapter / "adapters.safetensors"), {"model.other.lora_a": mx.ones((32, 2))})
    with pytest.raises(CheckpointError, match=r"the adapter does not fit tiny: .*model\.other\.lora_a"):
        load_target(folder, name="tiny", adapter_path=adapter)


def test_lazy_loading_gives_the_same_model(folder: Path) -> None:
    lazy = load_target(folder, name="tiny", lazy=True)[0]
    assert mx.array_equal(lazy(IDS), load_target(folder, name="tiny")[0](IDS))


def test_config_of_a_tiny_model_survives_a_round_trip() -> None:
    assert config_of(tiny_gemma4(wrapper="gemma4"))["text_config"]["sliding_window"] == 8
