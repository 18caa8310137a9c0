import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kinlens.embedder.errors import JobError
from kinlens.training.config.job import Job, expand_path, load_job, stored_job
from kinlens.training.folder import changes
from kinlens.training.library.sources import job_of

MINIMAL = 'name = "x"\n[data]\nkind = "folder"\nroot = "shop"\n'


def read(tmp_path: Path, text: str, changes: Sequence[str] = ()) -> Job:
    path = tmp_path / "job.toml"
    path.write_text(text)
    return load_job(path, changes)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (MINIMAL + "[optimizer]\nepoch = 3\n", r"optimizer.epoch: unknown key; did you mean 'ep"),
        (MINIMAL + "[optimizer]\nepochs = 0\n", r"optimizer.epochs = 0 is too small; use 1"),
        ("seed = 4294967296\n" + MINIMAL, "seed = 4294967296 is too large; use a number below"),
        ("name = 'x'\n", "data is missing"),
        (MINIMAL.replace("folder", "floppy"), "data 'floppy' is unknown; use .*'folder'"),
        (MINIMAL.replace('"x"', '"a/b"'), "name = 'a/b'"),
        (MINIMAL + "[input]\nsize_px = 200\nresize_px = 100\n", "crop_px = 200 is larger"),
        (
            MINIMAL + "[input]\nsize_px = 200\nresize_px = 100\ntest_px = 90\ncrop = 'fixed'\n",
            "cuts size_px = 200 from an image resized to resize_px = 100",
        ),
        (
            MINIMAL + "[loss]\nname = 'nothing'\n",
            "loss 'nothing' is unknown; use 'contrastive'.*'loss2'",
        ),
        (MINIMAL + "[loss]\nname = 'proxy_nca'\nscales = 1\n", "did you mean 'scale'"),
        (MINIMAL + "[loss]\nname = 'margin'\nnu = 0.1\n", "loss.margin.nu: unknown key"),
        (MINIMAL + "[optimizer]\nchunk = 70\n", "optimizer.chunk: unknown key"),
        (MINIMAL + "[sampling]\nconfused = 0.5\n", "sampling.confused: unknown key"),
        ("name = ", "is not valid TOML"),
        ("base = 3", "base = 3 must be the name of a job"),
        ('base = "nothing"', "base = 'nothing': No job 'nothing'.*one of: .*shop.*METHOD of .*nir"),
        ('base = "job.toml"', "forms a cycle"),
    ],
)
def test_a_job_that_does_not_fit_says_where(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(JobError, match=message):
        read(tmp_path, text)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("epochs=3", "--set epochs=3: unknown key; did you mean optimizer.epochs?"),
        ("optimizer.chunk=70", "--set optimizer.chunk=70: unknown key"),
        ("loss.name=proxyanchor", "loss 'proxyanchor' is unknown; did you mean proxy_anchor?"),
        ("loss=arcface", 'loss is a table (given: "arcface"): write loss.name=arcface.'),
        ("optimizer=adam", 'optimizer is a table (given: "adam"): set one of its keys.'),
        ("loss.name=triplet", 'set start.proxies = "random" (and sampling.kind = "balanced"'),
        (
            "model.backbone=resnet51",
            "--set model.backbone=resnet51 is unknown; use mobilenet_v2, r",
        ),
        ("optimizer.epochs=x", "optimizer.epochs = 'x' is not a whole number"),
        ("recall_at=1", "recall_at must be a list (got 1)"),
    ],
)
def test_a_wrong_option_is_named_and_not_the_job_that_it_changes(
    override: str, message: str
) -> None:
    with pytest.raises(JobError) as caught:
        load_job("adapt", [override])
    assert message in str(caught.value)
    assert not re.search("adapt.toml|Input should|Value error|[Tt]ag |given: {", str(caught.value))


@pytest.mark.parametrize(
    ("override", "cure"),
    [
        ("optimizer.warmup_epochs=30", "the trunk would never be trained in 30 epochs"),
        ("sampling.per_class=4", 'set sampling.kind = "balanced"'),
        ("optimizer.step_epochs=3", 'set optimizer.schedule = "step"'),
        ("model.views=2", "set model.frozen_trunk = true"),
        ("model.weights=none", 'set model.batch_norm = "train"'),
        ("optimizer.lr_flows=0.5", "no regularizer has a flow"),
    ],
)
def test_a_setting_without_effect_is_refused_with_what_it_needs(
    tmp_path: Path, override: str, cure: str
) -> None:
    path = tmp_path / "job.toml"
    path.write_text(MINIMAL)
    with pytest.raises(JobError, match=f"{override.partition('=')[0]} = .* has no effect.*{cure}"):
        job_of(path, [override])
    table, _, setting = override.partition(".")
    path.write_text(f"{MINIMAL}[{table}]\n{setting.replace('none', repr('none'))}\n")
    with pytest.raises(JobError, match="has no effect here"):
        job_of(path)
    assert job_of({**load_job(path).as_dict()})  # as programs write it: each setting of each table
    assert job_of(path, [f"{table}.{setting}", *CURES[table]])


@pytest.mark.parametrize(
    ("others", "idle", "cure"),
    [
        ([], "protocol.alpha=0.5", "protocol.choose_by=alpha"),
        ([], "start.images=50", "start.projection=trunk"),
        (["model.frozen_trunk=true", "model.views=1"], "input.colour=0.4", "model.views=4"),
        (["{skewed}.weight=1"], "{skewed}.exponent=3", "{skewed}.kind=r2"),
        (["{skewed}.weight=1"], "{skewed}.delta=0.3", "{skewed}.hinge=true"),
        (["{skewed}.kind=distance"], "{skewed}.gamma=3", "{skewed}.kind=log_exp"),
        (["{skewed}.kind=r2"], "{skewed}.hinge=true", "{skewed}.kind=r1"),
        (["{determinant}.penalty=log_det"], "{determinant}.depth=mean", "{determinant}.penalty=r"),
    ],
)
def test_a_setting_that_another_one_idles_is_refused(
    tmp_path: Path, others: list[str], idle: str, cure: str
) -> None:
    path, names = tmp_path / "job.toml", ("skewed_mean", "determinant")
    path.write_text(MINIMAL)
    tables = {name.partition("_")[0]: f"regularizers.{name}" for name in names}
    *others, idle, cure = (text.format(**tables) for text in (*others, idle, cure))
    assert job_of(path, others)
    name, needed = idle.partition("=")[0], cure.partition("=")[0].rpartition(".")[2]
    with pytest.raises(JobError, match=rf"{re.escape(name)} = .* no effect here: .*{needed}"):
        job_of(path, [*others, idle])
    assert job_of(path, [*others, idle, cure])


CURES = {
    "optimizer": [
        "optimizer.epochs=40",
        "optimizer.schedule=step",
        "regularizers.determinant.share=0.2",
    ],
    "sampling": ["sampling.kind=balanced"],
    "model": ["model.frozen_trunk=true", "model.batch_norm=train"],
}


def test_an_override_reaches_the_loss_that_a_job_does_not_name(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text(MINIMAL)
    found = job_of(path, ["loss.margin=0.2"]).loss
    assert (found.name, found.margin, found.alpha) == ("proxy_anchor", 0.2, 32)


def test_a_job_file_that_does_not_exist_is_named_with_its_neighbour(tmp_path: Path) -> None:
    (tmp_path / "own.toml").write_text(MINIMAL)
    with pytest.raises(JobError, match=r"own.tml does not exist; did you mean .*/own.toml\?"):
        load_job(tmp_path / "own.tml")
    with pytest.raises(JobError, match=r"No job 'adept'. Did you mean adapt\?"):
        load_job("adept")


def test_a_retired_setting_is_read_with_the_value_that_is_left(tmp_path: Path) -> None:
    text = MINIMAL + "[loss]\nname = 'margin'\n"
    old = read(tmp_path, f"\ufeff{text}nu = 0.0\nlearn_beta = true\n")  # Windows writes a mark
    assert old == read(tmp_path, text)
    stored = old.as_dict()
    stored["loss"]["nu"] = 0.0
    stored["optimizer"]["chunk"], stored["sampling"]["confused"] = 70, 0.5  # gone with any value
    assert changes(stored, old) == []
    assert stored_job(stored, "the job of the run") == old


def test_squashed_images_may_be_cut_as_they_need_where_there_is_one_view(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text(MINIMAL)
    of_one_view = ["model.frozen_trunk=true", "model.views=1"]
    squashed = [*of_one_view, "input.aspect=squashed"]
    with pytest.raises(JobError, match='needs crop = "fixed"'):
        job_of(path, squashed)
    assert job_of(path, [*squashed, "input.crop=fixed"]).input.crop == "fixed"
    with pytest.raises(JobError, match=r"input\.crop = 'fixed' has no effect here"):
        job_of(path, [*of_one_view, "input.crop=fixed"])


def test_every_setting_of_a_job_has_a_description() -> None:
    schema = Job.model_json_schema()
    tables = {"Job": schema, **schema["$defs"]}
    choices = [node["discriminator"] for node in schema["properties"].values() if "oneOf" in node]
    chosen = {
        (link.split("/")[-1], choice["propertyName"])
        for choice in choices
        for link in choice["mapping"].values()
    }  # keys that choose a table, which has the description

    def is_table(setting: dict[str, Any]) -> bool:
        return any("$ref" in part for part in (setting, *setting.get("anyOf", ())))

    missing = [
        f"{name}.{key}"
        for name, table in tables.items()
        for key, setting in table["properties"].items()
        if not setting.get("description") and not is_table(setting) and (name, key) not in chosen
    ]
    assert len(tables) > 30
    assert not missing, f"Describe below the setting, or in the Args of the loss: {missing}"


def test_settings_can_be_changed_on_the_command_line(tmp_path: Path) -> None:
    for malformed in ("epochs", "=3", "name.x=3"):
        with pytest.raises(JobError, match="--set"):
            read(tmp_path, MINIMAL, [malformed])
    changes = ["optimizer.epochs=3", "model.weights=none", "regularizers.determinant.lambda1=0.5"]
    job = read(tmp_path, MINIMAL, changes)
    assert (job.optimizer.epochs, job.model.weights) == (3, "none")
    assert job.regularizers.determinant.lambda1 == 0.5
    assert (job.loss.name, job.loss.alpha) == ("proxy_anchor", 32)  # as by default


def test_variables_in_paths_are_replaced_or_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOP", "/data")
    monkeypatch.delenv("NOPE", raising=False)
    assert expand_path("$SHOP/images", "data.root") == Path("/data/images")
    with pytest.raises(JobError, match=r"NOPE, which is not set.*--set data.root="):
        expand_path("${NOPE}/images", "data.root")


def test_a_job_is_its_base_with_other_values_on_top(tmp_path: Path) -> None:
    """Regularizers add up, and a table of another kind replaces the one below it."""
    below = load_job("cub-determinant")
    text = """
        base = "cub-determinant"
        data = {kind = "folder", root = "shop"}
        loss = {name = "arcface", scale = 30.0}
        [regularizers]
        determinant.lambda1 = 0.5
        skewed_mean.weight = 3.0
    """
    job = read(tmp_path, text, ["optimizer.epochs=7"])
    assert job.data.model_dump(exclude_unset=True) == {"kind": "folder", "root": "shop"}
    assert job.loss.model_dump(exclude_unset=True) == {"name": "arcface", "scale": 30.0}
    changed = below.regularizers.determinant.model_copy(update={"lambda1": 0.5})
    assert job.regularizers.determinant == changed
    assert job.regularizers.skewed_mean.weight == 3.0
    assert job.optimizer == below.optimizer.model_copy(update={"epochs": 7})
    (tmp_path / "job.toml").rename(tmp_path / "shop.toml")
    above = read(tmp_path, 'base = "shop.toml"\n[optimizer]\nkind = "adamw"\nbatch_size = 8\n')
    assert (above.optimizer.kind, above.optimizer.epochs) == ("adamw", below.optimizer.epochs)
    assert above.loss == job.loss
