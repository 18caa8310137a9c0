"""A gallery from photos to answers without a service: `python -m tests.support.library_walk DIR`.

It runs on every system. It needs what `kinlens[cpu]` installs, and onnx for its tiny model. With
`--as-windows` it runs on Linux under rules of Windows, see `tests/support/windows_rules.py`.
"""

import json
import os
import sys
import warnings
from pathlib import Path

from tests.support.windows_rules import follow_windows_rules


def walk(folder: Path) -> None:
    """Build, search, add, change, remove, compact, back up and check; keys have slashes."""
    import kinlens
    from kinlens.commands.__main__ import app
    from tests.tiny import encoded, photo

    def run(*words: object) -> None:
        code = app([str(word) for word in words], standalone_mode=False)
        assert not code, (words, code)

    shop, out = folder / "shop", folder / "galleries/shop"
    for number in range(12):
        file = shop / f"{'mugs' if number % 2 else 'shoes'}/{number}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(encoded(photo(number)))
    bundle = write_bundle_of(folder / "bundle")
    model = ("--bundle", bundle)
    run("build", shop, *model, "--out", out)
    embedder = kinlens.load_bundle(bundle)
    gallery = kinlens.open_gallery(out, embedder)
    [hits] = gallery.search(embedder.embed_files([shop / "shoes/2.png"]), k=3)
    assert [hits[0].key, hits[0].attributes["class"]] == ["shoes/2.png", "shoes"]

    # All changes come from other openings, as from other processes, while this one searches.
    (shop / "mugs/new.png").write_bytes(encoded(photo(20)))
    (shop / "mugs/1.png").write_bytes(encoded(photo(21)))
    run("sync", out, shop, *model)
    run("update", out, "mugs/new.png", "--set", "price:number=12.5")
    run("remove", out, "mugs/3.png", "mugs/5.png")
    run("unremove", out, "mugs/5.png")
    run("remove", out, *(f"shoes/{number}.png" for number in (4, 6, 8)))
    for _ in range(2):  # the second one removes what the first one has replaced
        run("compact", out)
        [hits] = gallery.search(embedder.embed_files([shop / "mugs/new.png"]), k=12)
        assert len(hits) == 9
        assert hits[0].key == "mugs/new.png"
    run("search", out, "--image", shop / "mugs/new.png", *model, "--where", "price < 20")
    gallery.put("uploaded", shop / "mugs/new.png", {"price": 3})
    assert gallery.image("uploaded") == (shop / "mugs/new.png").read_bytes()
    assert gallery.remove("uploaded") == 1
    run("build", shop, *model, "--out", out)  # in place of the one that is open
    with_others = kinlens.open_gallery(out, embedder)
    assert with_others.size == 13
    for opened in (gallery, with_others):
        opened.close()
    run("compact", out)
    run("backup", out, "--out", folder / "backup")
    run("restore", folder / "backup", "--out", folder / "galleries/again")
    for each in (out, folder / "galleries/again"):
        run("verify", each)
    report = json.loads((next(out.glob("versions/*/report.json"))).read_text(encoding="utf-8"))
    assert report
    left = [*folder.rglob(".stage-*")]
    assert all(one.name.startswith(".stage-lock-") for one in left), left


def check_locks(folder: Path) -> None:
    """A writer excludes all others, readers exclude writers, and a folder in use stays."""
    from kinlens.embedder.durable import discard, exclusive, holder, in_use, lock_folder, shared

    file, used = folder / "LOCK", folder / "used"
    with exclusive(file, wait=True) as is_first, exclusive(file, wait=False) as is_second:
        assert (is_first, is_second) == (True, False)
        assert holder(file) == str(os.getpid())
        with shared(file) as is_reader:
            assert not is_reader
    with shared(file) as is_first, shared(file) as is_second, exclusive(file, wait=False) as alone:
        assert (is_first, is_second, alone) == (True, True, False)
    used.mkdir()
    readers = [lock_folder(used) for _ in range(20)]
    for reader in readers:
        assert in_use(used)
        os.close(reader)
    assert not in_use(used)
    discard(used)
    assert [one.name for one in folder.iterdir()] == ["LOCK"]


def write_bundle_of(folder: Path) -> Path:
    """The tiny bundle of the tests."""
    from tests.tiny import write_tiny_bundle

    folder.mkdir()
    return write_tiny_bundle(folder).path


if __name__ == "__main__":
    # With `-X warn_default_encoding`: a text file without an encoding is another one on Windows.
    warnings.filterwarnings("error", category=EncodingWarning, module=r"kinlens\.")
    if "--as-windows" in sys.argv:
        follow_windows_rules()
    locks = Path(sys.argv[1], "locks")
    locks.mkdir()
    check_locks(locks)
    walk(Path(sys.argv[1]))
    sys.stdout.write("walked\n")
