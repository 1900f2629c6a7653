"""A driver for `test_serve_yaml`: two ranks and two workers of the service `default`; told by lines on stdin.

`sync`: one whole sync, checked bit for bit. `hold`: begin one in which w1 stands still. `go`: let it go on, and
check. Each is answered with a line of JSON. The folders of both helpers are on PYTHONPATH.
"""

from __future__ import annotations

import json
import sys

import fault_helpers
import helpers
import ray

from weightsync.service import connect

ray.cloudpickle.register_pickle_by_value(helpers)
ray.cloudpickle.register_pickle_by_value(fault_helpers)


def main() -> None:
    scene = fault_helpers.Scene(service=connect("default"))
    scene.set_workers(2)
    publishing: list[object] = []
    print(json.dumps({"ready": scene.version}), flush=True)
    for line in sys.stdin:
        command = line.strip()
        if command == "sync":
            answer = scene.check_sync(["w0", "w1"])
        elif command == "hold":
            ray.get(scene.workers["w1"].hold_at.remote("pulling"))
            publishing = scene.publish()
            assert ray.get(scene.workers["w1"].reached.remote())
            print(json.dumps({"held": scene.version}), flush=True)
            continue
        else:
            ray.get(scene.workers["w1"].go_on.remote())
            answer, _ = ray.get(publishing)[0]
            assert ray.get([w.sync.remote(scene.version) for w in scene.workers.values()]) == [scene.version] * 2
            assert all(ray.get([w.holds.remote(scene.version) for w in scene.workers.values()]))
        print(json.dumps({"version": answer.version, "installed": answer.installed}), flush=True)


if __name__ == "__main__":
    main()
