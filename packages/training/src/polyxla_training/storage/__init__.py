"""Files and directories, on this machine or in an object store. Imports nothing heavy."""
