"""``python -m analyzer``: the same as the command ``analyzer``."""

from analyzer.cli import main

raise SystemExit(main())
