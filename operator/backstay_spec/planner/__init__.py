"""The policies of the planner, one module for each, as pure functions from immutable facts to typed verdicts.

`facts` has the input of the policies, `record` the counters in the status (incarnations, budgets, back-off), and
`effects` the changes of a verdict. Only `backstay_spec.plan` combines the policies.

| module | question |
|---|---|
| `end` | Has the job failed, by a pod's report or a deadline? What is cleaned up? |
| `script_mistake` | Is an exception a mistake of the script that no attempt cures? |
| `same_exception` | Do the pods raise the same exception before the first update? |
| `after_training` | Has training ended, and the script of worker 0 too? |
| `replacement` | Which pod fills a slot next? |
| `standbys` | Which pod follows the active server of a shard? |
| `hung` | Is a running pod hung? |
| `promotion` | Does the standby of a shard become its active server? |
| `order` | Which pods are created first, and which are deleted to make room for a server? |
| `admission` | Which pods does a queue admit together? Which wait for the end of an old pod? |
| `budgets` | What does a pod's death cost, and may the slot have another pod? |
| `surplus` | Which pods does the job no longer need? |
| `services` | Which Secret, NetworkPolicy and Services are missing, or select the wrong pod? |
| `conditions` | Which conditions does the status have? |
| `report` | Which status is written, and when? |
"""
