"""Download official data sets: fetch, verify, unpack, and only then move into place."""

import shutil
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pooch

from kinlens.embedder.errors import DatasetError

_CHUNK = 2**18
_SPACE_FACTOR = 2.1  # times the archive, as images unpack to about its size


@dataclass(frozen=True)
class Source:
    """An archive at a stable address, its MD5 as published, and the folder that it unpacks to."""

    name: str
    url: str
    md5: str
    folder: str
    gigabytes: float
    licence: str

    @property
    def archive(self) -> str:
        return self.url.rpartition("/")[2]


SOURCES: Mapping[str, Source] = {
    "cub": Source(
        name="CUB-200-2011",
        url="https://data.caltech.edu/records/65de6-vp158/files/CUB_200_2011.tgz",
        md5="97eceeb196236b17998738112f37df78",
        folder="CUB_200_2011",
        gigabytes=1.15,
        licence="for non-commercial research and education",
    ),
    "aircraft": Source(
        name="FGVC-Aircraft",
        url="https://www.robots.ox.ac.uk/~vgg/data/fgvc-aircraft/archives/"
        "fgvc-aircraft-2013b.tar.gz",
        md5="d4acdd33327262359767eeaa97a4f732",
        folder="fgvc-aircraft-2013b",
        gigabytes=2.75,
        licence="for non-commercial research",
    ),
    "sop": Source(
        name="Stanford Online Products",
        url="http://ftp.cs.stanford.edu/cs/cvgl/Stanford_Online_Products.zip",
        md5="7f73d41a2f44250d4779881525aea32e",
        folder="Stanford_Online_Products",
        gigabytes=3.08,
        licence="for research (https://cvgl.stanford.edu/projects/lifted_struct/)",
    ),
}

BY_HAND: Mapping[str, str] = {
    "cars196": """\
Cars196 has no address since its authors' link died in 2023, and there is no published checksum.
Ask the authors (https://ai.stanford.edu/~jkrause/cars/car_dataset.html) or a colleague for the
release with all images in one folder, and lay it out like this:

  {root}/cars196/cars_annos.mat
  {root}/cars196/car_ims/000001.jpg ... 016185.jpg

Then check it: kinlens-train data doctor {root}/cars196""",
    "in_shop": """\
In-Shop Clothes Retrieval is distributed by the authors of DeepFashion for non-commercial research,
after an agreement: https://mmlab.ie.cuhk.edu.hk/projects/DeepFashion/InShopRetrieval.html
Of "In-shop Clothes Retrieval Benchmark" take Img/img.zip (52,712 images of at most 256 px, not
img_highres.zip) and Eval/list_eval_partition.txt, and lay them out like this:

  {root}/in_shop/Eval/list_eval_partition.txt
  {root}/in_shop/img/WOMEN/...   {root}/in_shop/img/MEN/...

Then check it: kinlens-train data doctor {root}/in_shop""",
}


def find_source(name: str) -> Source:
    if name not in SOURCES:
        raise DatasetError(
            f"Unknown data set {name!r}. Give one of {', '.join((*SOURCES, *BY_HAND))}."
        )
    return SOURCES[name]


def obtain(
    source: Source,
    root: Path,
    url: str | None = None,
    keep_archive: bool = False,
    report: Callable[[str], object] = lambda _: None,
) -> Path:
    """Download a data set into `root`, unless it exists; returns its folder.

    An archive that is in `root` already is used. The folder appears only when it is complete. `url`
    is another address of the same file. Raises: DatasetError.
    """
    folder, archive = root / source.folder, root / source.archive
    if folder.exists():
        return folder
    try:
        root.mkdir(parents=True, exist_ok=True)
        if not archive.exists():
            free, needed = shutil.disk_usage(root).free / 1e9, _SPACE_FACTOR * source.gigabytes
            if free < needed:
                raise DatasetError(
                    f"{root} has {free:.2f} GB free; {needed:.2f} GB are needed to download and "
                    f"unpack {source.name}. Free space or choose another --root."
                )
            report(f"{source.name} is being downloaded: {source.gigabytes:g} GB.")
        _fetch(source, url or source.url, archive)
        report(f"{source.name} is unpacked.")
        _unpack(archive, folder)
    except OSError as error:
        raise DatasetError(f"{root}: {error}. Free space or choose another --root.") from error
    if not keep_archive:
        archive.unlink()
    return folder


def _fetch(source: Source, url: str, archive: Path) -> None:
    """Download the file to `archive`, unless it exists."""
    headers, hooks = {"Accept-Encoding": "identity"}, {"response": _as_stored}
    downloader = pooch.HTTPDownloader(
        progressbar=True, chunk_size=_CHUNK, headers=headers, hooks=hooks
    )
    known = f"md5:{source.md5}"
    try:
        pooch.retrieve(url, known, archive.name, archive.parent, downloader=downloader)
        return
    except (ValueError, OSError) as error:
        fault = str(error)  # the error itself keeps the connection open
    raise DatasetError(
        f"{source.name} could not be downloaded. {url}: {fault}. Check the network and run this "
        "command again; pass --url with another address of the same file; or get it by other "
        f"means, such as curl -L -C - -o {archive} {url}, and run this again: it uses the archive "
        "there."
    )


def _as_stored(response: Any, *_: object, **__: object) -> None:
    """Disable the decoding by content type, which would decompress a .tgz during the download."""
    response.raw.headers.pop("Content-Encoding", None)


def _unpack(archive: Path, folder: Path) -> None:
    """Unpack to a temporary folder, which is renamed when it is complete."""
    aside = folder.with_name(f".{folder.name}.unpacking")
    shutil.rmtree(aside, ignore_errors=True)
    try:
        if zipfile.is_zipfile(archive):
            shutil.unpack_archive(archive, aside, "zip")
        else:
            shutil.unpack_archive(archive, aside, "gztar", filter="data")
        (aside / folder.name).rename(folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
