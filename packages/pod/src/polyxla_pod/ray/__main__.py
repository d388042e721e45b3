"""``python -m polyxla_pod.ray``: one host's part of a launch from a driver."""

from __future__ import annotations

from polyxla_pod.ray.call import main

if __name__ == "__main__":
    main()
