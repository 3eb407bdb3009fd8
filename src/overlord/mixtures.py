"""Mixtures of many sources: sources from a table, weights in groups, and weights from measured sizes."""

from overlord.jobfile.sizes import measure as measure
from overlord.jobfile.table import Catalog as Catalog
from overlord.jobfile.table import read_table as read_table
from overlord.jobfile.weighting import grouped as grouped
from overlord.jobfile.weighting import temperature as temperature
from overlord.jobfile.weighting import unimax as unimax
