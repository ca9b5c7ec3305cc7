"""Each pod of a tested job runs this file: ``python _pod.py TARGET [ARGUMENT...]``; see `_program`."""

from backstay.testing._program import main

main()
