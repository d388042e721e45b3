"""Prints what a script can find out about its main module, as JSON."""

import json
import pickle
import sys


class Thing:
    pass


main = sys.modules["__main__"]
print(
    json.dumps(
        {
            "name": __name__,
            "file": __file__,
            "code": sys._getframe().f_code.co_filename,
            "argv": sys.argv,
            "path": sys.path[0],
            "package": __package__,
            "spec": None if __spec__ is None else __spec__.name,
            "is main": main.__dict__ is globals(),
            "pickles": type(pickle.loads(pickle.dumps(Thing()))) is Thing,
        }
    )
)
