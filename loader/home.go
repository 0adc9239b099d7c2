// SPDX-License-Identifier: Apache-2.0

package loader

import (
	"errors"
	"fmt"
	"runtime"

	"github.com/vishvananda/netns"
)

// A home is a thread in the network namespace of an interface: the kernel looks for interfaces in that of the thread
// that asks. The thread stays, as the process may give up the right to go there.
type home struct {
	calls chan func()
	left  chan struct{}
}

var errHomeLeft = errors.New("the interface was left")

// homeHere is in the namespace of the calling thread. The caller leaves it.
func homeHere() (*home, error) {
	ns, err := netns.Get()
	if err != nil {
		return nil, fmt.Errorf("open the thread's network namespace: %w", err)
	}
	defer ns.Close()
	h := &home{calls: make(chan func()), left: make(chan struct{})}
	entered := make(chan error)
	go h.stay(ns, entered)
	if err := <-entered; err != nil {
		return nil, err
	}
	return h, nil
}

// stay is the thread. It was not moved if it was there already. Else it ends with its goroutine, which has it locked.
func (h *home) stay(ns netns.NsHandle, entered chan<- error) {
	runtime.LockOSThread()
	now, err := netns.Get()
	if err != nil {
		runtime.UnlockOSThread()
		entered <- fmt.Errorf("open the thread's network namespace: %w", err)
		return
	}
	there := now.Equal(ns)
	_ = now.Close()
	if there {
		defer runtime.UnlockOSThread()
	} else if err := netns.Set(ns); err != nil {
		runtime.UnlockOSThread()
		entered <- fmt.Errorf("enter the interface's network namespace: %w", err)
		return
	}
	entered <- nil
	for {
		select {
		case call := <-h.calls:
			call()
		case <-h.left:
			return
		}
	}
}

// leave ends the thread. It is called once, or with no home.
func (h *home) leave() {
	if h != nil {
		close(h.left)
	}
}

// do runs fn on the thread.
func (h *home) do(fn func() error) error {
	if h == nil {
		return errHomeLeft
	}
	result := make(chan error, 1)
	select {
	case h.calls <- func() { result <- fn() }:
		return <-result
	case <-h.left:
		return errHomeLeft
	}
}
