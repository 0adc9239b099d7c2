// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/xspin/xspin/control"
	"github.com/xspin/xspin/hostq"
)

// memoryOf returns what this process has of the kernel's memory that is made of elements,
// each map once, and how much of all BPF maps it has mapped.
func memoryOf(t *testing.T) (kernel, mapped int64) {
	t.Helper()
	fds, err := os.ReadDir("/proc/self/fd")
	must(t, err)
	maps := map[int64]int64{}
	for _, fd := range fds {
		info, err := os.ReadFile("/proc/self/fdinfo/" + fd.Name())
		if err != nil {
			continue // that of the list itself
		}
		var size, n, id int64
		for line := range strings.Lines(string(info)) {
			for key, v := range map[string]*int64{"value_size": &size, "max_entries": &n, "map_id": &id} {
				_, _ = fmt.Sscanf(line, key+":%d", v)
			}
		}
		if size == hostq.Element {
			maps[id] = size * n
		}
	}
	for _, n := range maps {
		kernel += n
	}
	text, err := os.ReadFile("/proc/self/maps")
	must(t, err)
	for line := range strings.Lines(string(text)) {
		var from, to int64
		if !strings.Contains(line, "anon_inode:bpf-map") {
			continue
		}
		if _, err := fmt.Sscanf(line, "%x-%x", &from, &to); err != nil {
			t.Fatalf("%q: %v", line, err)
		}
		mapped += to - from
	}
	return kernel, mapped
}

// limits.memory counts what the kernel gives, which is what is mapped in whole elements:
// windows, HPU memory and queues, shared ones once, from the check of a configuration to
// the removal of the context.
func TestWhatIsMappedIsWhatLimitsMemoryCounts(t *testing.T) {
	f := launch(t, "windows: [{name: ours, size: 1025KiB}]\n")
	if kernel, _ := memoryOf(t); kernel != f.inUse() {
		t.Errorf("a shared window: %d bytes are counted, the kernel has %d", f.inUse(), kernel)
	}
	const slack = 64 << 10 // of what the NIC has mapped, which goes when it is collected
	before, mappedBefore := memoryOf(t)
	usedBefore := f.inUse()
	for _, tc := range []struct {
		name     string
		windows  []control.Window
		memory   control.Size
		perHPU   control.Size
		queue    *control.Queue
		memories int64 // that are made
	}{
		{"nothing", nil, 0, 0, nil, 0},
		{"windows of whole elements", []control.Window{{Name: "a", Size: 1 << 20}, {Name: "b", Size: 3 << 20}}, 0, 0, nil, 2},
		{"windows with a part of one", []control.Window{{Name: "a", Size: 1}, {Name: "b", Size: 1<<20 + 1}}, 0, 0, nil, 2},
		{"a shared window", []control.Window{{Name: "ours"}}, 0, 0, nil, 0},
		{"memory", nil, 2<<20 + 5, 0, nil, 1},
		{"memory of two HPUs", nil, 0, 768 << 10, nil, 1},
		{"a queue", nil, 0, 0, &control.Queue{Events: 16384, Requests: 16, Payload: 64}, 1},
		{"all", []control.Window{{Name: "a", Size: 5000}, {Name: "ours"}}, 16, 16, &control.Queue{}, 4},
	} {
		doc := &control.Context{
			Name: "x", Handler: "test-init", Rulesets: "a: udp(9)",
			Windows: tc.windows, Memory: tc.memory, HPUMemory: tc.perHPU, Queue: tc.queue,
		}
		_, err := f.install(doc)
		must(t, err)
		h, err := f.find("x")
		must(t, err)
		kernel, mapped := memoryOf(t)
		kernel, mapped = kernel-before, mapped-mappedBefore
		used := f.inUse() - usedBefore
		if used != kernel || h.contextPlan().charge() != kernel {
			t.Errorf("%s: %d bytes are counted, %d when it was checked, the kernel has %d", tc.name, used, h.contextPlan().charge(), kernel)
		}
		if mapped > used+slack || mapped <= used-tc.memories*hostq.Element-slack {
			t.Errorf("%s: %d bytes are counted for %d that are mapped in %d memories", tc.name, used, mapped, tc.memories)
		}
		must(t, f.remove("x"))
		if kernel, mapped := memoryOf(t); f.inUse() != usedBefore || kernel != before || mapped > mappedBefore+slack {
			t.Errorf("%s: after it, %d bytes are counted, the kernel has %d, and %d are mapped: want %d, %d and no more than %d",
				tc.name, f.inUse(), kernel, mapped, usedBefore, before, mappedBefore)
		}
	}
}
