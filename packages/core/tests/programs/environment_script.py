"""Prints its arguments and the choices that ``polyxla run`` made, as JSON."""

import json
import os
import sys

names = ("POLYXLA_RUNTIME", "POLYXLA_DEVICES", "TOY_VISIBLE")
print(json.dumps([sys.argv, [os.environ[name] for name in names]]))
