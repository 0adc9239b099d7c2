// SPDX-License-Identifier: Apache-2.0

package loader

import (
	"fmt"
	"runtime"

	"github.com/vishvananda/netns"
)

// A home is the network namespace that an interface is in: the kernel looks for interfaces in that of the thread that asks.
type home struct{ ns netns.NsHandle }

// homeHere is that of the calling thread.
func homeHere() (*home, error) {
	ns, err := netns.Get()
	if err != nil {
		return nil, fmt.Errorf("open the thread's network namespace: %w", err)
	}
	return &home{ns}, nil
}

func (h *home) close() error {
	if h == nil || !h.ns.IsOpen() {
		return nil
	}
	return h.ns.Close()
}

// do runs fn on a thread that is in the namespace. Whoever is there asks for no right to go there.
func (h *home) do(fn func() error) error {
	result := make(chan error, 1)
	go func() { result <- h.here(fn) }()
	return <-result
}

func (h *home) here(fn func() error) error {
	runtime.LockOSThread()
	now, err := netns.Get()
	if err != nil {
		runtime.UnlockOSThread()
		return fmt.Errorf("open the thread's network namespace: %w", err)
	}
	defer now.Close()
	if now.Equal(h.ns) {
		defer runtime.UnlockOSThread()
		return fn()
	}
	if err := netns.Set(h.ns); err != nil {
		runtime.UnlockOSThread()
		return fmt.Errorf("enter the interface's network namespace: %w", err)
	}
	defer func() {
		// A thread that cannot be moved back stays locked: the runtime ends it with this goroutine.
		if netns.Set(now) == nil {
			runtime.UnlockOSThread()
		}
	}()
	return fn()
}
