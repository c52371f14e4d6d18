"""`python -m byte_lm`, from the folder `examples`."""

import sys

from byte_lm.train import main

sys.exit(main())
