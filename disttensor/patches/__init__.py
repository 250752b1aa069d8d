"""All changes that disttensor makes to torch: ``TABLE`` lists them with reasons, ``install`` makes
them at import, ``uninstall`` reverts them. Not here: code that works without a change to torch.
"""

from disttensor.patches.change import Change as Change
from disttensor.patches.table import TABLE as TABLE
from disttensor.patches.table import install as install
from disttensor.patches.table import uninstall as uninstall
