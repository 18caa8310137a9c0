from collections.abc import Callable
from pathlib import Path

import pytest

from embedder.errors import JobError
from training.studies.grid import Combination, load_grid

EXAMPLE = Path(__file__).with_name("grid.toml")
BASE = """
[job]
name = "base"
data = {kind = "folder", root = "nowhere"}
model = {weights = "none"}
"""
Write = Callable[[str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write_grid(text: str, base: str = BASE) -> Path:
        path = tmp_path / "grid.toml"
        path.write_text(text + base)
        return path

    return write_grid


def one(found: list[Combination], **axes: object) -> Combination:
    (match,) = [c for c in found if all(c.axes[name] == value for name, value in axes.items())]
    return match


def test_the_example_is_the_product_of_its_lists_less_what_it_excludes() -> None:
    found = load_grid(EXAMPLE)
    assert len(found) == 2 * 2 * (2 * 2 + 2)
    assert not [c for c in found if c.backbone == "resnet50" and c.regularizer == "determinant"]
    assert len({c.folder for c in found}) == len(found)
    assert len({c.job.name for c in found}) == len(found)
    assert [c.seed for c in found] == sorted(c.seed for c in found)


def test_entries_lay_their_settings_over_the_base_job() -> None:
    found = load_grid(EXAMPLE)
    job = one(
        found, loss="wide", regularizer="determinant", backbone="mobilenet_v2", dim=32, seed=1
    ).job
    assert (job.loss.margin, job.optimizer.lr_proxies) == (0.3, 1e-5)
    assert job.optimizer.lr_flows == 5e-4
    assert (job.model.backbone, job.model.dim, job.model.weights) == ("mobilenet_v2", 32, "none")
    assert job.seed == 1
    job = one(
        found, loss="proxy_anchor", regularizer="none", backbone="resnet50", dim=16, seed=0
    ).job
    assert (job.model.pooling, job.optimizer.batch_size) == ("gap", 100)
    assert (job.optimizer.lr_proxies, job.optimizer.lr_flows) == (1e-2, 1e-3)


def test_losses_and_regularizers_of_the_base_give_way() -> None:
    found = load_grid(EXAMPLE)
    for combination in found:
        assert combination.job.loss.alpha == 32.0
        determinant = combination.job.regularizers.determinant
        if combination.regularizer == "none":
            assert determinant is None
        else:
            assert determinant is not None
            assert determinant.lambda1 == 0.05


def test_lists_that_are_missing_are_those_of_the_base_job(write: Write) -> None:
    (only,) = load_grid(write(""))
    assert only.folder == Path("runs/mobilenet_v2-512/proxy_anchor/none/seed-0")
    assert (only.loss, only.regularizer, only.backbone) == ("proxy_anchor", "none", "mobilenet_v2")
    path = write("", BASE + "regularizers = {determinant = {lambda1 = 0.5}}\n")
    (only,) = load_grid(path, ["seed=3", "optimizer.epochs=2"])
    assert only.regularizer == "determinant"
    assert only.job.regularizers.determinant is not None
    assert only.job.regularizers.determinant.lambda1 == 0.5
    assert (only.seed, only.job.optimizer.epochs) == (3, 2)


def test_the_base_may_be_a_file_beside_the_grid_or_a_name(tmp_path: Path) -> None:
    (tmp_path / "base.toml").write_text(BASE.replace("[job]\n", ""))
    grid = tmp_path / "grid.toml"
    grid.write_text('job = "base.toml"\nseeds = [1, 2]')
    assert [c.seed for c in load_grid(grid)] == [1, 2]
    grid.write_text('job = "demo"')
    assert load_grid(grid)[0].job.data.kind == "rendered"


def test_only_keeps_what_one_of_its_tables_covers(write: Write) -> None:
    lists = "seeds = [0, 1]\ndims = [16, 32, 64]\n"
    found = load_grid(write(lists + "only = [{dim = [16, 32], seed = 0}, {dim = 64}]\n"))
    assert {(c.dim, c.seed) for c in found} == {(16, 0), (32, 0), (64, 0), (64, 1)}
    found = load_grid(write(lists + "only = [{seed = 0}]\nexclude = [{dim = 16}]\n"))
    assert {(c.dim, c.seed) for c in found} == {(32, 0), (64, 0)}


def test_two_combinations_that_are_the_same_job_are_refused(write: Write) -> None:
    twins = 'losses = ["proxy_anchor", {name = "again", loss = {name = "proxy_anchor"}}]\n'
    with pytest.raises(JobError, match=r"proxy_anchor-none-.* and again-none-.* are the same job"):
        load_grid(write(twins))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seed = [1]\n", "seed: unknown key; a grid has job, losses"),
        ("seeds = []\n", "seeds: .* at least 1 item"),
        ("dims = [64, 64]\n", "dims: .*64 is there twice"),
        ("dims = [true]\n", "dims.0: .* valid integer"),
        ("losses = [1]\n", r"losses.0: .* \(given: 1\)"),
        ('losses = ["a/b"]\n', r"losses.0.name: .* \(given: 'a/b'\)"),
        ('losses = ["proxy_anchor", "proxy_anchor"]\n', "'proxy_anchor' is there twice"),
        ('losses = ["proxy_ancor"]\n', "proxy_ancor-none-.* is not a valid job"),
        ('losses = [{name = "proxy_anchor", optimizer = {lr = 1}}]\n', "optimizer.lr: unknown key"),
        ('losses = [{name = "proxy_anchor", loss = "triplet"}]\n', "is not a valid job"),
        ("dims = [0, 16]\n", "(?s)proxy_anchor-none-mobilenet_v2-0-s0 is not.*model.dim"),
        ('exclude = [{los = "x"}]\n', "unknown axis 'los'; there are loss, regularizer"),
        ('exclude = [{loss = "x"}]\n', "no loss 'x' in this grid; there are proxy_anchor"),
        ('only = {loss = "proxy_anchor"}\n', "only: .* valid list"),
        ('exclude = [{loss = "proxy_anchor"}]\n', "leave no combination"),
        ("a = = b\n", "not valid TOML"),
    ],
)
def test_grids_that_make_no_sense_are_refused(write: Write, text: str, message: str) -> None:
    with pytest.raises(JobError, match=message):
        load_grid(write(text))


def test_a_grid_without_a_base_or_a_file_is_refused(write: Write, tmp_path: Path) -> None:
    with pytest.raises(JobError, match="job: Field required"):
        load_grid(write("", base=""))
    with pytest.raises(JobError, match="cannot be read"):
        load_grid(tmp_path / "absent.toml")
