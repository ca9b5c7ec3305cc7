"""The source files of a function or a script, as a ConfigMap, and the program that starts them in a pod."""
