"""Puts this package's `conf/` at the end of Hydra's search path, so that any Hydra app can say `parallel=zero1` or `model=gpt`."""

from pathlib import Path

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin

import lightning_par


class LightningParSearchPath(SearchPathPlugin):
    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        search_path.append(provider="lightning-par", path=f"file://{Path(lightning_par.__file__).parent / 'conf'}")
