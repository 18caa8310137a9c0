from pathlib import Path

import pytest

from embedder.errors import JobError
from training.config.job import JOBS, apply_override, expand_path, load_job, parse_job

MINIMAL = 'name = "x"\n[data]\nkind = "folder"\nroot = "shop"\n'


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "job.toml"
    path.write_text(text)
    return path


@pytest.mark.parametrize("name", [path.stem for path in JOBS.glob("*.toml")])
def test_every_shipped_job_loads_and_opens_with_its_command(name: str) -> None:
    assert load_job(name).name == name
    assert f"kinlens-train fit {name}" in (JOBS / f"{name}.toml").read_text()


def test_a_minimal_job_has_defaults(tmp_path: Path) -> None:
    job = load_job(write(tmp_path, MINIMAL))
    assert job.loss.alpha == 32
    assert job.regularizers.determinant is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            MINIMAL + "[optimizer]\nepoch = 3\n",
            r"optimizer.epoch: unknown key; did you mean 'epochs'",
        ),
        (
            MINIMAL + "[optimizer]\nepochs = 0\n",
            r"optimizer.epochs: .*greater than or equal to 1.*given: 0",
        ),
        ("name = 'x'\n", "data: Field required"),
        (MINIMAL.replace("folder", "floppy"), "data: .*floppy"),
        (MINIMAL.replace('"x"', '"a/b"'), "name: "),
        (MINIMAL + "[input]\nsize_px = 200\nresize_px = 100\n", "crop_px = 200 is larger"),
        (
            MINIMAL + "[input]\nsize_px = 200\nresize_px = 100\ntest_px = 90\ncrop = 'fixed'\n",
            "cuts size_px = 200 from an image resized to resize_px = 100",
        ),
        (
            MINIMAL + "[input]\ncrop = 'fixed'\nmin_crop_area = 0.5\n",
            "does not read min_crop_area",
        ),
        (
            MINIMAL + "[sampling]\nkind = 'balanced'\npairs = 'independent'\n",
            "does not read pairs",
        ),
        ("name = ", "is not valid TOML"),
    ],
)
def test_a_job_that_does_not_fit_says_where(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(JobError, match=message):
        load_job(write(tmp_path, text))


def test_an_unknown_job_lists_the_known_ones() -> None:
    with pytest.raises(JobError, match="cars196-half-detreg"):
        load_job("cars")


def test_settings_can_be_changed_on_the_command_line(tmp_path: Path) -> None:
    changes = ["optimizer.epochs=3", "model.weights=none", "regularizers.determinant.lambda1=0.5"]
    job = load_job(write(tmp_path, MINIMAL), changes)
    assert job.optimizer.epochs == 3
    assert job.model.weights == "none"
    assert job.regularizers.determinant is not None
    assert job.regularizers.determinant.lambda1 == 0.5


@pytest.mark.parametrize("change", ["epochs", "=3", "name.x=3"])
def test_a_malformed_change_is_refused(tmp_path: Path, change: str) -> None:
    with pytest.raises(JobError, match="--set"):
        load_job(write(tmp_path, MINIMAL), [change])


def test_a_job_survives_being_stored(tmp_path: Path) -> None:
    job = load_job("cars196-half-detreg")
    assert parse_job(job.as_dict()) == job


@pytest.mark.parametrize(("old", "depth"), [(True, "mean"), (False, "sum")])
def test_a_job_stored_before_the_depth_of_r_had_its_name_means_what_it_did(
    old: bool, depth: str
) -> None:
    content = load_job("cars196-half-determinant").as_dict()
    stored = content["regularizers"]["determinant"]
    assert stored.pop("depth") == "composed"
    stored["normalize_depth"] = old
    job = parse_job(content)
    assert job.regularizers.determinant is not None
    assert job.regularizers.determinant.depth == depth
    assert "normalize_depth" not in str(job.as_dict())
    apply_override(content, "regularizers.determinant.depth=mean")
    with pytest.raises(JobError, match="normalize_depth is the old name of depth"):
        parse_job(content)


def test_variables_in_paths_are_replaced_or_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOP", "/data")
    monkeypatch.delenv("NOPE", raising=False)
    assert expand_path("$SHOP/images", "data.root") == Path("/data/images")
    with pytest.raises(JobError, match=r"NOPE, which is not set.*--set data.root="):
        expand_path("${NOPE}/images", "data.root")
