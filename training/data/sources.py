"""Where the official data sets come from."""

from collections.abc import Mapping
from dataclasses import dataclass

_GIB = 2**30


@dataclass(frozen=True)
class Source:
    """An archive with a stable address.

    Args:
        name: of the data set.
        urls: addresses of the same file, tried in order.
        md5: of the file, as its authors or several independent users publish it.
        archive: name of the file.
        folder: what it unpacks to, and what `data.root` then names.
        most_bytes: what it may unpack to at most, as a defence against a forged archive.
        licence: what its authors ask.
    """

    name: str
    urls: tuple[str, ...]
    md5: str
    archive: str
    folder: str
    most_bytes: int
    licence: str


SOURCES: Mapping[str, Source] = {
    "cub": Source(
        name="CUB-200-2011",
        urls=("https://data.caltech.edu/records/65de6-vp158/files/CUB_200_2011.tgz",),
        md5="97eceeb196236b17998738112f37df78",
        archive="CUB_200_2011.tgz",
        folder="CUB_200_2011",
        most_bytes=4 * _GIB,
        licence="for non-commercial research and education",
    ),
    "aircraft": Source(
        name="FGVC-Aircraft",
        urls=(
            "https://www.robots.ox.ac.uk/~vgg/data/fgvc-aircraft/archives/"
            "fgvc-aircraft-2013b.tar.gz",
        ),
        md5="d4acdd33327262359767eeaa97a4f732",
        archive="fgvc-aircraft-2013b.tar.gz",
        folder="fgvc-aircraft-2013b",
        most_bytes=8 * _GIB,
        licence="for non-commercial research",
    ),
    "sop": Source(
        name="Stanford Online Products",
        urls=(
            "http://ftp.cs.stanford.edu/cs/cvgl/Stanford_Online_Products.zip",
            "ftp://cs.stanford.edu/cs/cvgl/Stanford_Online_Products.zip",
        ),
        md5="7f73d41a2f44250d4779881525aea32e",
        archive="Stanford_Online_Products.zip",
        folder="Stanford_Online_Products",
        most_bytes=8 * _GIB,
        licence="for research (https://cvgl.stanford.edu/projects/lifted_struct/)",
    ),
}

BY_HAND: Mapping[str, str] = {
    "cars196": """\
Cars196 has no stable address: the link of its authors
(https://ai.stanford.edu/~jkrause/cars/car_dataset.html) has been dead since 2023. You need the
release with all images in one folder, not the one divided into cars_train/ and cars_test/:

  cars_annos.mat    annotations of 16,185 images
  car_ims.tgz       the images

Ask the authors or a colleague for a copy. Several projects name
http://ftp.cs.stanford.edu/cs/cvgl/CARS196.zip; nobody publishes a checksum of it, so it is not
fetched here. Lay it out like this:

  {root}/cars196/cars_annos.mat
  {root}/cars196/car_ims/000001.jpg ... 016185.jpg

Then check it, and name it in your job as data.root with data.kind = "cars196":

  kinlens-train data doctor {root}/cars196""",
    "in_shop": """\
In-Shop Clothes Retrieval is given out by the authors of DeepFashion after an agreement, for
non-commercial research:

1. Open https://mmlab.ie.cuhk.edu.hk/projects/DeepFashion/InShopRetrieval.html and follow its
   download instructions: fill in the agreement and send it; the answer has the password of
   the archives that are locked.
2. From "In-shop Clothes Retrieval Benchmark" take these files (not img_highres.zip):

  Img/img.zip                     52,712 images of at most 256 px
  Eval/list_eval_partition.txt    train, query and gallery

3. Unpack img.zip, and lay them out like this (Anno/ instead of Eval/, and Img/img/ instead of
   img/, are read too):

  {root}/in_shop/Eval/list_eval_partition.txt
  {root}/in_shop/img/WOMEN/...   {root}/in_shop/img/MEN/...

4. Then check it, and name it in your job as data.root with data.kind = "in_shop":

  kinlens-train data doctor {root}/in_shop""",
}
