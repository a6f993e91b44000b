"""Adapters that people bring: read, continued, held against, and written in every format as
diffusers itself reads them."""

import copy
import dataclasses
import json
import re
from functools import cache

import diffusers
import huggingface_hub
import pytest
import torch
from diffusers import FluxPipeline, FluxTransformer2DModel
from diffusers.loaders import single_file_utils
from peft import LoraConfig
from safetensors.torch import load_file, save_file

from g2rpo import api
from g2rpo.config.read import completed, load_config
from g2rpo.core.errors import UserError
from g2rpo.data.testbed import pipeline_dir
from g2rpo.lab.export import tensors_for
from g2rpo.models.adapter_files import FLOATS, HARMLESS, PeftConfig, read_adapter
from g2rpo.models.adapters import DOWN, PREFIX, UP, Adapter, endings
from g2rpo.models.blueprint import build_shallow, read_blueprint, size_of
from g2rpo.models.catalogue import SPECS
from g2rpo.models.hub import find_adapter
from g2rpo.models.meta import on_meta
from tests.support.adapters import fused, random_adapter, random_pairs, write
from tests.support.commands import done, g2rpo, refused
from tests.support.policies import build_on_meta, guided_by, moved, policy_of, velocity
from tests.support.tiny import flux_pipeline
from tests.support.tiny_pipelines import CLASSES, tiny_pipeline
from tests.support.tolerances import network, rounding
from tests.support.variants import few

KIND = "FluxPipeline"
ENDS = ["to_q", "to_k", "to_v", "to_out.0"]
CONTINUED = {"lora_rank": 3, "lora_alpha": 6.0, "lora_targets": ENDS}
SAVED = "pytorch_lora_weights.safetensors"


@cache
def transformer(kind=KIND):
    return tiny_pipeline(kind).transformer


def read(file, kind=KIND):
    return read_adapter(file, getattr(diffusers, kind), transformer(kind))


def saved(file, tensors, header=None):
    save_file({name: value.clone() for name, value in tensors.items()}, file, metadata=header)
    return file


def is_same(one, other):
    """Equal to the bit."""
    pairs = [(one.layers[module], other.layers[module]) for module in other.layers]
    return one.layers.keys() == other.layers.keys() and all(
        torch.equal(a, b) for pair in pairs for a, b in zip(*pair, strict=True)
    )


def assert_same(found, expected):
    """Velocities of the tiny FLUX whose weights are the same, but added in other places."""
    torch.testing.assert_close(found, expected, **network(expected.abs().max()))


@pytest.fixture(scope="module")
def brought():
    return random_adapter(transformer(), ENDS)


@pytest.fixture
def file(brought, tmp_path):
    brought.write(tmp_path / "brought.safetensors", PREFIX)
    return tmp_path / "brought.safetensors"


@pytest.fixture
def x(tmp_path):
    """Where a test puts an adapter."""
    return tmp_path / "x.safetensors"


ORIGINALS = ["Flux2KleinPipeline", "QwenImagePipeline", "ZImagePipeline", "WanPipeline"]
OTHERS_OF_COMFYUI = "Flux StableDiffusion3 Chroma Krea2 LTX"
READ = {
    "diffusers": [kind for kind in CLASSES if not SPECS[kind].pictured],
    "comfyui": [*ORIGINALS, *(f"{name}Pipeline" for name in OTHERS_OF_COMFYUI.split())],
    "kohya": ORIGINALS,
    "ai-toolkit": ORIGINALS,
}
"""The classes whose tiny models diffusers reads in a format; its kohya converter of FLUX.1 and that
of Lumina 2 have the widths of the real models."""
CASES = [(kind, format) for format, kinds in READ.items() for kind in kinds]


@pytest.mark.parametrize(("kind", "format"), few(CASES, ("Flux2KleinPipeline", "kohya").__eq__))
def test_velocities_with_a_file_are_diffusers_own_whether_it_is_read_or_written(
    kind, format, tmp_path
):
    """With the file that we read, and with the one that we write: but for the order of sums. The
    adapter changes them a hundred times as much. diffusers' kohya converter of Wan expects layers
    of its mlp, too."""
    pipeline, targets = tiny_pipeline(kind), list(SPECS[kind].lora_targets)
    targets += ["net.0.proj", "net.2"] * (kind == "WanPipeline")
    adapter = random_adapter(pipeline.transformer, targets)
    file = write(adapter, tmp_path / "x.safetensors", format, pipeline.transformer)
    ends = endings(adapter.layers, [name for name, _ in pipeline.transformer.named_modules()])
    untrained = velocity(policy_of(copy.deepcopy(pipeline)))
    theirs = velocity(policy_of(fused(copy.deepcopy(pipeline), file)))
    options = {"adapter": str(file), "lora_rank": 3, "lora_alpha": 6, "lora_targets": ends}
    continued = policy_of(copy.deepcopy(pipeline), "lora", **options)
    close = network(guided_by(continued) * theirs.abs().max())
    assert (theirs - untrained).abs().max() > 100 * close["atol"]
    torch.testing.assert_close(velocity(continued), theirs, **close)
    written = continued.save(tmp_path / "written")
    torch.testing.assert_close(velocity(policy_of(fused(pipeline, written))), theirs, **close)


def flux_of_real_width():
    """An adapter with the matrices of FLUX.1's first blocks, for which diffusers' kohya converter
    has the widths."""
    square = [f"attn.{name}" for name in ("to_q", "to_k", "to_v")]
    added = [f"attn.add_{each}_proj" for each in "qkv"]
    double = dict.fromkeys([*square, *added, "attn.to_out.0"], (3072, 3072))
    double |= {"ff.net.0.proj": (4 * 3072, 3072), "ff.net.2": (3072, 4 * 3072)}
    single = dict.fromkeys(square, (3072, 3072)) | {"proj_out": (3072, 5 * 3072)}
    shapes = {f"transformer_blocks.0.{name}": shape for name, shape in double.items()}
    shapes |= {f"single_transformer_blocks.0.{name}": shape for name, shape in single.items()}
    return random_pairs(shapes, rank=2)


def test_a_kohya_file_of_flux_has_joint_matrices_and_comes_back_exactly(x):
    """What is absent of a joint matrix, here the mlp of the block of one stream, comes back as no
    change; of what diffusers' converter would leave out, the name is said."""
    adapter = flux_of_real_width()
    tensors = tensors_for(adapter, SPECS[KIND].comfyui, "kohya")
    assert "lora_unet_single_blocks_0_linear1.lora_up.weight" in tensors
    model = on_meta(("diffusers:FluxTransformer2DModel", {"num_layers": 1, "num_single_layers": 1}))
    back = read_adapter(saved(x, tensors), FluxPipeline, model)
    assert not back.layers.pop("single_transformer_blocks.0.proj_mlp")[1].any()
    assert is_same(back, adapter)
    ends = {"lora_down": torch.ones(2, 8), "lora_up": torch.ones(8, 2)}
    odd = {f"lora_unet_odd.{end}.weight": value for end, value in ends.items()}
    with pytest.raises(UserError, match=r"does not fit.*lora_unet_odd"):
        read_adapter(saved(x, tensors | odd), FluxPipeline, model)


def halved(tensors, alphas=True):
    """The same change, of second factors half as large, by the endings of trainers; with `alphas`
    of twice the rank."""
    found = {}
    for name, value in tensors.items():
        module, _, end = name.partition(".lora_")
        if end in ("A.weight", "down.weight"):
            found[f"{module}.lora_down.weight"] = value
        elif end:
            found[f"{module}.lora_up.weight"] = value / 2
            found |= {f"{module}.alpha": torch.tensor(6.0)} if alphas else {}
    return found


def as_peft(adapter, folder):
    """As peft itself saves: alpha is beside the tensors."""
    config = {"r": 3, "lora_alpha": 6, "rank_pattern": {}}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    tensors = halved(adapter.tensors("base_model.model."), alphas=False)
    return saved(folder / "adapter_model.safetensors", tensors)


WITH_ALPHAS = [(KIND, "diffusers"), ("ZImagePipeline", "kohya"), ("WanPipeline", "comfyui")]


@pytest.mark.parametrize(("kind", "format"), WITH_ALPHAS)
def test_alpha_is_the_files_and_factors_are_as_they_were_trained(kind, format, x):
    """By the model's own names, and by those for which diffusers has converters, of which Wan's
    multiplies in place."""
    adapter = random_adapter(transformer(kind), ENDS)
    tensors = adapter.tensors(PREFIX)
    if format != "diffusers":
        tensors = tensors_for(adapter, SPECS[kind].comfyui, format)
    found = read(saved(x, halved(tensors)), kind)
    assert (found.scale, found.rank) == (2.0, 3) and is_same(found, adapter)


def test_the_last_modulation_of_flux2_is_read_with_scale_before_shift(x):
    """As diffusers has it; the original weights, and so ai-toolkit's files, have the shift
    first."""
    adapter = random_adapter(transformer("Flux2KleinPipeline"), ["norm_out.linear"])
    ((down, up),) = adapter.layers.values()
    last = "final_layer.adaLN_modulation.1"
    swapped = Adapter({last: (down, torch.cat(up.chunk(2)[::-1]))})
    swapped.write(x, "diffusion_model.")
    assert is_same(read(x, "Flux2KleinPipeline"), adapter)


def test_the_start_stays_while_the_adapter_is_trained_and_strength_leads_from_one_to_the_other(
    file, tmp_path
):
    policy = policy_of(flux_pipeline(), "lora", adapter=str(file), **CONTINUED)
    start, plain = velocity(policy), velocity(policy_of(flux_pipeline()))
    changed = velocity(moved(policy))
    assert min(float((start - other).abs().max()) for other in (plain, changed)) > 1e-2
    assert all(".default." in name for name in policy.tuning.named())
    with policy.base():
        assert torch.equal(velocity(policy), start)  # to the bit, as before the first update
        assert all(value.requires_grad for value in policy.trainable_parameters())
    assert torch.equal(velocity(policy), changed)
    weights = policy.save(tmp_path / "tuned")
    assert not any("start" in name for name in load_file(weights))
    sampled = policy_of(flux_pipeline(), adapter=str(file), keep_base=True)
    assert_same(velocity(sampled), start)
    sampled.load(tmp_path / "tuned", 0.0)
    for strength, expected in ((0.0, start), (1.0, changed)):
        sampled.tuning.scale(strength)
        assert_same(velocity(sampled), expected)
        with sampled.base():
            assert_same(velocity(sampled), start)
    assert_same(velocity(policy_of(fused(flux_pipeline(), weights))), changed)


def test_full_tuning_begins_with_the_adapter_merged_in(file, tmp_path):
    expected = velocity(policy_of(fused(flux_pipeline(), file)))
    policy = policy_of(flux_pipeline(), "full", adapter=str(file))
    assert_same(velocity(policy), expected)
    changed = velocity(moved(policy, 0.02))
    policy.save(tmp_path / "full")
    sampled = policy_of(flux_pipeline(), adapter=str(file), keep_base=True)
    sampled.load(tmp_path / "full")
    assert_same(velocity(sampled), changed)
    for each in (policy, sampled):
        with each.base():
            assert_same(velocity(each), expected)


@pytest.mark.parametrize("named", ["", "/lora/adapter_model.safetensors"])
def test_an_adapter_of_peft_on_the_hub_comes_with_its_config(brought, tmp_path, monkeypatch, named):
    """From a hub that is a folder here, one file at a time."""
    there, cache = tmp_path / "hub", tmp_path / "cache"
    folder = there / "lora" if named else there
    folder.mkdir(parents=True)
    as_peft(brought, folder)
    (folder / "training.safetensors").touch()
    files = [path.relative_to(there).as_posix() for path in there.rglob("*.*")]

    def download(repository, file):
        (cache / file).parent.mkdir(parents=True, exist_ok=True)
        (cache / file).write_bytes((there / file).read_bytes())
        return str(cache / file)

    monkeypatch.setattr(huggingface_hub, "list_repo_files", lambda repository: files)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    monkeypatch.setattr("g2rpo.models.hub.obstacle", lambda repository: None)
    found = read_adapter(find_adapter(f"someone/theirs{named}"))
    assert found.scale == 2.0 and is_same(found, brought)


def test_plans_and_checks_with_fewer_blocks_take_an_adapter_of_the_last_ones(tmp_path):
    """As of a large model, which is built with two blocks of each kind before it is loaded. The
    start is beside the trained adapter, in float32."""
    pipeline = tiny_pipeline("ZImagePipeline")
    assert len(pipeline.transformer.layers) == 3
    pipeline.save_pretrained(tmp_path / "model")
    last = ["layers.2.attention.to_q", "layers.2.feed_forward.w2"]
    random_adapter(pipeline.transformer, last).write(tmp_path / "last.safetensors", PREFIX)
    own = {"path": tmp_path / "model", "adapter": tmp_path / "last.safetensors", "device": "cpu"}
    own |= {"height": 32, "width": 32, "max_sequence_length": 24}
    settings = [f"policy.{name}={value}" for name, value in own.items()]
    config = completed(load_config("z-image-lora", settings)).policy
    assert config.lora_targets == ["2.attention.to_q", "2.feed_forward.w2"]
    policy, times = build_shallow(read_blueprint(config), config)
    whole, plain = (
        build_on_meta(read_blueprint(each), each)
        for each in (config, config.model_copy(update={"adapter": None}))
    )
    assert times[-3:] == [1, 1, 1] and policy.tuning.named().keys() == whole.tuning.named().keys()
    start = size_of(whole.pipeline.transformer) - size_of(plain.pipeline.transformer)
    assert start == sum(value.nbytes for value in whole.trainable_parameters())


def test_a_config_is_read_without_opening_the_adapter_that_it_names():
    """The recipe's own values are left out; those that the user sets stay, to be compared with the
    adapter's."""
    notes, absent = [], "policy.adapter=absent.safetensors"
    policy = load_config("z-image-lora", [absent, "policy.lora_alpha=3"], notes.append).policy
    assert not {"lora_rank", "lora_targets"} & policy.model_fields_set and policy.lora_alpha == 3
    assert any(f"{absent}: its own rank" in note and "lora_rank=" in note for note in notes)
    own = [absent, f"policy.path={pipeline_dir()}", "policy.pipeline="]
    with pytest.raises(UserError, match=f"{absent}: there is no such file"):
        completed(load_config("z-image-lora", own))


@pytest.mark.slow
def test_a_run_continues_an_adapter_and_exports_both_and_what_was_learnt(
    tiny_config, flux_directory, file, tmp_path, capsys
):
    """lora_rank=2 of the config file disagrees with the adapter's 3, so it is taken out."""
    run, own = tmp_path / "run", [f"policy.adapter={file}"]
    kl = ["algorithm.kl_weight=0.1", "rewards.brightness=1", "optim.learning_rate=0.02"]
    kl += ["algorithm.name=flow_grpo", "algorithm.group_size=4", "optim.ema_decay=0.5"]
    tiny_config.write_text(tiny_config.read_text().replace("lora_rank: 2", ""))
    code, out, err = g2rpo(
        capsys, "train", tiny_config, *own, *kl, "trainer.iterations=1", "--run-dir", run
    )
    assert code == 0, err
    assert "rank 3, alpha 3 and 7 modules" in " ".join((out + err).split())
    done(capsys, "resume", run, "trainer.iterations=2")

    config = api.sampler(run, base=True).policy.options
    assert (config.lora_rank, config.lora_alpha, config.lora_targets) == (3, 3.0, sorted(ENDS))
    base, tuned = (velocity(api.sampler(run, base=each).policy) for each in (True, False))
    assert float((base - tuned).abs().max()) > 1e-4

    def begun():
        return fused(FluxPipeline.from_pretrained(flux_directory), file)

    assert_same(base, velocity(policy_of(begun(), max_sequence_length=12)))
    pictures = [api.sample(run, ["a red circle"], base=each) for each in (True, False)]
    assert not torch.equal(*pictures)

    both, learnt = (
        read_adapter(api.export(run, "diffusers", learnt=each) / SAVED) for each in (False, True)
    )
    assert (both.rank, learnt.rank) == (3, 6)
    loaded = fused(begun(), api.export(run, "comfyui", learnt=True))
    assert_same(velocity(policy_of(loaded, max_sequence_length=12)), tuned)
    out = tmp_path / "last.safetensors"
    last = read_adapter(api.export(run, "comfyui", checkpoint="last", out=out))
    assert last.layers.keys() == both.layers.keys()
    assert find_adapter(str(run)) == run / "adapter" / SAVED
    assert "It continues `brought.safetensors`" in (run / "adapter" / "README.md").read_text()
    done(capsys, "plan", tiny_config, *own)
    file.write_bytes(file.read_bytes()[:-4] + bytes(4))
    assert "policy.adapter" in refused(capsys, "resume", run, "trainer.iterations=3")


@pytest.fixture
def wrong(file, tmp_path, monkeypatch):
    """A folder, in which the test is, with a sound adapter and what is none of this model."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    for place in ("x.bin", "pickles/x.bin", "run/x.bin", "run/config.yaml"):
        (tmp_path / place).parent.mkdir(exist_ok=True)
        (tmp_path / place).touch()
    random_adapter(transformer("ZImagePipeline"), ENDS).write(
        tmp_path / "other.safetensors", PREFIX
    )
    layers = random_adapter(transformer(), ENDS).layers
    wider = Adapter({name: (torch.ones(3, 7), up) for name, (_, up) in layers.items()})
    wider.write(tmp_path / "wider.safetensors", PREFIX)
    merged = {"transformer_blocks.0.attn.to_q.weight": torch.ones(2, 2)}
    saved(tmp_path / "merged.safetensors", merged)
    (tmp_path / "no.safetensors").write_bytes(b"no")


REFUSED = """
absent.safetensors | absent.safetensors: there is no such file or folder
other.safetensors | other.safetensors: does not fit this FluxTransformer2DModel
wider.safetensors | have another shape, such as single_transformer_blocks.0.attn.to_k
merged.safetensors | a merged model is no adapter
no.safetensors | no.safetensors: cannot be read
brought.safetensors | policy.lora_rank=2: the adapter .*has 3; take it out
brought.safetensors policy.lora_rank=3 policy.lora_targets=[to_q] | policy.lora_targets=
x.bin | a pickle could run code
pickles | holds pickles only
run | is a run without an adapter
someone/theirs | is no file or folder here, and is not in the local hub cache
"""


@pytest.mark.parametrize("case", REFUSED.strip().splitlines())
def test_what_is_no_adapter_of_the_model_or_contradicts_one_is_said(
    wrong, tiny_config, tmp_path, capsys, case
):
    given, message = case.split(" | ")
    err = refused(capsys, "train", tiny_config, *f"policy.adapter={given}".split())
    assert re.search(message, err), err
    assert not (tmp_path / "runs").exists()


def test_a_pointer_in_the_place_of_an_adapter_is_named(x):
    x.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    for use in (read, policy_of(flux_pipeline()).load):
        with pytest.raises(UserError, match=r"is a pointer of git-lfs, .*`git lfs pull`"):
            use(x)


def as_written(config, **changes):
    """What peft writes of a config."""
    plain = {**config.to_dict(), **changes}
    return {key: sorted(each) if isinstance(each, set) else each for key, each in plain.items()}


AS_TRAINED = {
    "alpha": {},
    "rsLoRA": {"use_rslora": True},
    "ranks and alphas by module": {
        "rank_pattern": {"to_q": 2, "attn.to_k": 4},
        "alpha_pattern": {"to_v": 1.5, "to_q": 5},
    },
    "an ending in an expression": {"alpha_pattern": {r"transformer_blocks\.0\.attn\.to_q": 2.5}},
    "other initial values": {"init_lora_weights": "orthogonal"},
}


@pytest.mark.parametrize("how", AS_TRAINED)
def test_the_change_of_weights_is_that_of_peft_whoever_wrote_the_file(tmp_path, how):
    """By diffusers' models, whose header has names without a prefix; by peft; and its weights with
    a model's own names. Products of float32 in another order."""
    trained = flux_pipeline().transformer
    config = LoraConfig(**{"r": 4, "lora_alpha": 6, "target_modules": ENDS, **AS_TRAINED[how]})
    # peft's orthogonal values need an even rank
    config.r = 3 if config.init_lora_weights is True else 4
    trained.add_adapter(config)
    modules = trained.named_modules()
    layers = {name: module for name, module in modules if hasattr(module, "lora_A")}
    for number, layer in enumerate(layers.values()):
        for value in (*layer.lora_A.parameters(), *layer.lora_B.parameters()):
            torch.nn.init.normal_(value, generator=torch.Generator().manual_seed(number))
    trained.save_lora_adapter(tmp_path / "diffusers", weight_name="x.safetensors")
    tensors = load_file(tmp_path / "diffusers/x.safetensors")
    for name, prefix in (("peft", "base_model.model."), ("own names", "")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_config.json").write_text(json.dumps(as_written(config)))
        prefixed = {prefix + key: value for key, value in tensors.items()}
        saved(tmp_path / name / "adapter_model.safetensors", prefixed)
    for file in tmp_path.glob("*/*.safetensors"):
        found = read(file)
        assert found.layers.keys() == layers.keys()
        for name, layer in layers.items():
            delta = layer.get_delta_weight("default").detach()
            # sums of four products, or of eight where initial values are taken off
            close = rounding(32, size=delta.abs().max())
            torch.testing.assert_close(found.delta(name), delta, **close)
        # what is in the weights is in no header any more
        found.write(tmp_path / "again.safetensors", PREFIX)
        assert is_same(read_adapter(tmp_path / "again.safetensors"), found)


def peft_header(**more):
    config = {"r": 3, "lora_alpha": 3, **more}
    named = {f"{PREFIX}{key}": value for key, value in config.items()}
    return {"lora_adapter_metadata": json.dumps(named)}


NO_EXPRESSION = "is a regular expression; only names of modules"
HEADERS = [
    (peft_header(use_dora=True), "use_dora, which is not supported"),
    (peft_header(rank_pattern={"to_q": 8}), "has rank 3, but r=8"),
    (peft_header(alpha_pattern={"(a+)+": 1}), NO_EXPRESSION),
    (peft_header(rank_pattern={".*to_(q|k)": 3}), NO_EXPRESSION),
    (peft_header(lora_alpha=1e300), ""),
    ({"lora_adapter_metadata": "{"}, ""),
    ({"g2rpo.lora_alpha": "nan", "ss_network_dim": "3"}, ""),
    ({"g2rpo.lora_alpha": "1e300", "ss_network_dim": "3"}, ""),
    ({"g2rpo.lora_alpha": "3", "ss_network_dim": "0"}, ""),
    ({"g2rpo.lora_above": "1.5"}, ""),
]


@pytest.mark.parametrize(("header", "message"), HEADERS, ids=str)
def test_a_header_of_another_kind_or_with_impossible_values_is_refused(brought, x, header, message):
    saved(x, brought.tensors(PREFIX), header)
    with pytest.raises(UserError, match=f"x.safetensors: .*{message}"):
        read(x)


INITIAL = ("pissa", "pissa_niter_4", "olora", "corda", "loftq", "eva", "lora_ga", "mica")
NOT_DEFAULT = {"init_lora_weights": INITIAL, "bias": ("all", "lora_only"), "peft_type": ("LOHA",)}
SETTINGS = {field.name for field in dataclasses.fields(LoraConfig)} - PeftConfig.model_fields.keys()
JUDGED = sorted(name for name in SETTINGS if HARMLESS.get(name, ()) is not None)
CHANGED = [(name, value) for name in JUDGED for value in NOT_DEFAULT.get(name, [{"x": 1}, True])]
OTHERS = [
    *((changes, f"has {changes[0]}, which is not supported") for changes in CHANGED),
    (("of_a_later_peft", 1), "has of_a_later_peft, which is not supported"),
    (("r", 4), "r=4 in the config"),
    (("r", None), "r: Input"),
    (("lora_alpha", 0), "lora_alpha: Input"),
    (("lora_alpha", float("nan")), "lora_alpha: Input"),
    (None, "adapter_config.json; put that file beside"),
]


def test_a_file_of_peft_needs_a_config_that_says_nothing_but_a_plain_lora(brought, tmp_path):
    """Every field of the installed LoraConfig but those that are used, or listed as harmless, is
    refused by its name."""
    file, beside = as_peft(brought, tmp_path), tmp_path / "adapter_config.json"
    given = json.loads(beside.read_text())
    for changes, message in OTHERS:
        beside.unlink(missing_ok=True)
        if changes is not None:
            beside.write_text(json.dumps({**given, changes[0]: changes[1]}))
        with pytest.raises(UserError, match=message):
            read(file)
    more = {"exclude_modules": ["x"], "lora_dropout": 0.1, "inference_mode": True}
    config = LoraConfig(r=3, lora_alpha=6, target_modules=ENDS, **more)
    for harmless in ("gaussian", False):
        plain = {"init_lora_weights": harmless, "peft_type": "LORA", "of_later": None}
        beside.write_text(json.dumps(as_written(config, **plain)))
        found = read(file)
        assert found.scale == 2.0 and is_same(found, brought)


def kohya(prefix):
    ends = {DOWN: ".lora_down.weight", UP: ".lora_up.weight"}
    return lambda module, end: prefix + module.replace(".", "_") + ends[end]


def plain(prefix):
    return lambda module, end: prefix + module + end


PREFIXES = (
    *("", "transformer.", "diffusion_model.", "model.diffusion_model.", "unet.", "_orig_mod."),
    *("module._orig_mod.", "transformer._fsdp_wrapped_module.", "transformer.module."),
)
WRAPPED = ".0._fsdp_wrapped_module._checkpoint_wrapped_module."
OLD = {DOWN: ".lora.down.weight", UP: ".lora.up.weight"}
WRITTEN = {
    **{prefix: plain(prefix) for prefix in PREFIXES},
    **{prefix: kohya(prefix) for prefix in ("lora_transformer_", "lora_unet_", "lycoris_")},
    "default": lambda module, end: f"{PREFIX}{module}{end.replace('.weight', '.default.weight')}",
    "no weight": lambda module, end: f"{PREFIX}{module}{end.removesuffix('.weight')}",
    "old diffusers": lambda module, end: f"{module}{OLD[end]}",
    "inside": lambda module, end: f"{PREFIX}{module.replace('.0.', WRAPPED)}{end}",
}
FAMILIES = (KIND, "QwenImagePipeline", "WanPipeline", "ZImagePipeline", "Flux2KleinPipeline")


@pytest.mark.parametrize("kind", few(FAMILIES, KIND.__eq__))
def test_names_are_the_models_whatever_trainers_and_wrappers_put_around_them(kind, x):
    adapter = random_adapter(transformer(kind), ENDS)
    for how, name in WRITTEN.items():
        tensors = {}
        for module, (down, up) in adapter.layers.items():
            tensors |= {name(module, DOWN): down, name(module, UP): up}
        assert is_same(read(saved(x, tensors), kind), adapter), how
        saved(x, {f"weird.{key}": value for key, value in tensors.items()})
        with pytest.raises(UserError, match=r"(?s)such as weird.*The model has |leaves out"):
            read(x, kind)


LEFT_OUT = """
.diff | whole weights
.lora_B.bias | biases
.oft | other tensors
.oft_R.weight | OFT
.lokr_w1 | LoKr
.hada_w1_a | LoHa
.dora_scale | DoRA
.lora_A.scale_weight | in fewer bits
.comfy_quant | in fewer bits
lora_te1_text_model.x
text_encoder_2.x
clip_l.x
t5xxl.x
qwen25_7b.x
vae.decoder.x
"""


def test_what_an_adapter_of_the_transformer_alone_would_leave_out_is_refused(brought, x):
    """Beside sound factors, whose names hold "diff": of a module, or of other parts."""
    ours, module = brought.tensors("model.diffusion_model."), next(iter(brought.layers))
    for case in LEFT_OUT.strip().splitlines():
        name, _, kind = case.partition(" | ")
        beside = {f"model.diffusion_model.{module}{name}": torch.ones(2)}
        if not kind:
            beside = {f"{name}{DOWN}": torch.ones(3, 8), f"{name}{UP}": torch.ones(8, 3)}
            kind = f"changes text encoders or a VAE too .2 of .*such as {name}"
        with pytest.raises(UserError, match=kind):
            read(saved(x, ours | beside))


def test_prefixes_may_differ_and_of_several_adapters_none_is_chosen(brought, x):
    ours = brought.tensors(PREFIX)

    def renamed(old, new):
        return {name.replace(old, new): value for name, value in ours.items()}

    layers = list(brought.layers.items())
    mixed = Adapter(dict(layers[:2])).tensors("diffusion_model.")
    mixed |= Adapter(dict(layers[2:])).tensors(PREFIX)
    assert is_same(read(saved(x, mixed)), brought)
    for tensors, said in (
        (renamed(".weight", ".a.weight") | renamed(".weight", ".b.weight"), "adapters, a, b"),
        (ours | renamed(PREFIX, f"{PREFIX}_orig_mod."), "twice"),
        (ours | renamed(PREFIX, "unet."), "two adapters of"),
    ):
        with pytest.raises(UserError, match=said):
            read(saved(x, tensors))


class Weights(dict):
    """A checkpoint whose other tensors are 0, in as many rows as diffusers' converters divide."""

    def pop(self, name, *default):
        return super().pop(name, torch.zeros(7 * 3072 if "linear1" in name else 6, 1))


ORIGINAL = {  # diffusers' converter; modules of the original weights, and their rows
    KIND: (
        single_file_utils.convert_flux_transformer_checkpoint_to_diffusers,
        """
        double_blocks.0.img_attn.qkv 9216
        double_blocks.0.txt_attn.qkv 9216
        double_blocks.0.txt_attn.proj 3072
        double_blocks.0.txt_mlp.0 12288
        double_blocks.0.img_mod.lin 18432
        single_blocks.0.modulation.lin 9216
        single_blocks.0.linear1 21504
        single_blocks.0.linear2 3072
        img_in 3072
        txt_in 3072
        time_in.out_layer 3072
        vector_in.in_layer 3072
        guidance_in.in_layer 3072
        final_layer.linear 64
        final_layer.adaLN_modulation.1 6144
        """,
    ),
    "StableDiffusion3Pipeline": (
        single_file_utils.convert_sd3_transformer_checkpoint_to_diffusers,
        """
        joint_blocks.0.x_block.attn.qkv 96
        joint_blocks.0.context_block.attn.qkv 96
        joint_blocks.0.x_block.attn2.qkv 96
        joint_blocks.0.x_block.attn2.proj 32
        joint_blocks.0.context_block.attn.proj 32
        joint_blocks.1.x_block.attn.proj 32
        joint_blocks.1.x_block.mlp.fc1 128
        joint_blocks.0.context_block.mlp.fc2 32
        joint_blocks.0.x_block.adaLN_modulation.1 288
        joint_blocks.0.context_block.adaLN_modulation.1 192
        joint_blocks.1.context_block.adaLN_modulation.1 64
        context_embedder 32
        t_embedder.mlp.0 32
        y_embedder.mlp.2 32
        final_layer.linear 16
        final_layer.adaLN_modulation.1 64
        """,
    ),
    "ZImagePipeline": (
        single_file_utils.convert_z_image_transformer_checkpoint_to_diffusers,
        """
        layers.1.attention.qkv 96
        layers.9.attention.qkv 96
        noise_refiner.0.attention.out 32
        layers.1.feed_forward.w1 85
        x_embedder 32
        final_layer.linear 16
        """,
    ),
    "LTXPipeline": (
        single_file_utils.convert_ltx_transformer_checkpoint_to_diffusers,
        "patchify_proj 32\n adaln_single.linear 192\n transformer_blocks.0.attn1.to_q 32",
    ),
    "WanPipeline": (
        single_file_utils.convert_wan_transformer_to_diffusers,
        """
        blocks.1.cross_attn.q 24
        blocks.1.ffn.2 24
        time_embedding.2 24
        time_projection.1 144
        head.head 16
        blocks.7.self_attn.o 24
        """,
    ),
}


@pytest.mark.parametrize("kind", ORIGINAL)
def test_original_names_are_read_as_diffusers_converts_the_original_weights(kind, tmp_path):
    """It reads no LoRA with these: with lora_A, of single modules, or at all. The models of plans
    have fewer blocks than the file."""
    model, (converted, table) = transformer(kind), ORIGINAL[kind]
    if kind == KIND:  # the converter has the real widths
        with torch.device("meta"):
            model = FluxTransformer2DModel(num_layers=1, num_single_layers=1, guidance_embeds=True)
    rows = {name: int(count) for name, count in map(str.split, table.strip().splitlines())}
    draw = torch.Generator().manual_seed(0)
    ups = {name: torch.randn(count, 2, generator=draw) for name, count in rows.items()}
    theirs = converted(Weights({f"{name}.weight": up for name, up in ups.items()}))
    expected = {name.removesuffix(".weight"): up for name, up in theirs.items() if up.any()}
    assert len(expected) >= len(rows)
    (tmp_path / "adapter_config.json").write_text(json.dumps({"r": 2, "lora_alpha": 2}))
    for name_of in (plain("diffusion_model."), plain("base_model.model."), kohya("lora_unet_")):
        tensors = {}
        for name, up in ups.items():
            tensors |= {name_of(name, DOWN): torch.ones(2, 3), name_of(name, UP): up}
        file = saved(tmp_path / "x.safetensors", tensors)
        found = read_adapter(file, getattr(diffusers, kind), model).layers
        assert found.keys() == expected.keys()
        assert all(torch.equal(up, expected[name]) for name, (_, up) in found.items())
        assert all(torch.equal(down, torch.ones(2, 3)) for down, _ in found.values())


def test_a_joint_matrix_of_other_rows_is_refused(x):
    joint = Adapter({"layers.0.attention.qkv": (torch.ones(2, 32), torch.ones(90, 2))})
    joint.write(x)
    with pytest.raises(UserError, match=r"qkv: has 90 rows, but .* have 96"):
        read(x, "ZImagePipeline")


IN, OUT = torch.ones(2, 8), torch.ones(8, 2)
NO_ADAPTER = {
    "NaN": (IN * float("nan"), OUT),
    "infinite": (IN, OUT / 0),
    "beyond float32": (IN.double() * 1e300, OUT),
    "rank 0": (torch.ones(0, 8), torch.ones(8, 0)),
    "no size": (torch.tensor(1.0), OUT),
    "a vector": (IN[0], OUT),
    "of two ranks": (IN, torch.ones(8, 3)),
    "4-d up alone": (IN, OUT[..., None, None]),
    "a kernel in up": (torch.ones(2, 8, 3, 3), torch.ones(8, 2, 3, 3)),
    "whole numbers": (IN.to(torch.int8), OUT),
    **{
        f"alpha {value}": (IN, OUT, torch.tensor(value))
        for value in (float("nan"), float("inf"), -2.0, 0.0, 1e-45)
    },
    "alpha beyond float32": (IN, OUT, torch.tensor(1e300, dtype=torch.float64)),
    "alpha that overflows": (IN, OUT * 1e30, torch.tensor(1e30)),
    "a product that overflows": (IN * 1e20, OUT * 1e20),
    "two alphas": (IN, OUT, torch.ones(2)),
}


@pytest.mark.parametrize("case", NO_ADAPTER)
def test_what_is_no_finite_change_of_weights_is_refused_where_it_is_read(case, x):
    names = (f"{PREFIX}m{DOWN}", f"{PREFIX}m{UP}", f"{PREFIX}m.alpha")
    saved(x, dict(zip(names, NO_ADAPTER[case], strict=False)))
    with pytest.raises(UserError, match=r"x.safetensors: transformer.m\."):
        read(x)


def test_a_file_that_is_not_there_is_one_message(x):
    with pytest.raises(UserError, match="cannot be read: .*No such file"):
        read_adapter(x)


def test_factors_of_every_floating_point_type_are_read_exactly(brought, x):
    for dtype in FLOATS:
        small = {name: value.to(dtype) for name, value in brought.tensors(PREFIX).items()}
        found = read(saved(x, small)).tensors(PREFIX)
        assert all(torch.equal(found[name], value.float()) for name, value in small.items()), dtype
