"""Puts this package's `conf/` at the end of Hydra's search path, so that any Hydra app can say `parallel=zero1` or `model=gpt`."""

from importlib.util import find_spec
from pathlib import Path

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin


class LightningParSearchPath(SearchPathPlugin):
    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        package = Path(find_spec("lightning_par").origin).parent  # found, not imported: apps that use none of it pay nothing
        search_path.append(provider="lightning-par", path=f"file://{package / 'conf'}")
