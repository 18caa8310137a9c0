"""Where commands find the galleries of the library."""

from kinlens.library.stores import bundle_of as bundle_of
from kinlens.library.stores import calibrate as calibrate
from kinlens.library.stores import compact_if_due as compact_if_due
from kinlens.library.stores import in_folder as in_folder
from kinlens.library.stores import milvus_token as milvus_token
from kinlens.library.stores import opened as opened
