"""DeepSpeed's checkpoints, read and written without DeepSpeed.

The formats are those of DeepSpeed 0.19.8; each function names the file of DeepSpeed that its facts were read from. Nothing here needs the
package, a rank or a device: files and tensors only.
"""

from lightning_par.checkpoint.deepspeed.names import is_deepspeed, is_universal
from lightning_par.checkpoint.deepspeed.read import open_deepspeed
from lightning_par.checkpoint.deepspeed.universal import open_universal, write_universal
from lightning_par.checkpoint.deepspeed.write import write_deepspeed

__all__ = ["is_deepspeed", "is_universal", "open_deepspeed", "open_universal", "write_deepspeed", "write_universal"]
