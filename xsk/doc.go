// SPDX-License-Identifier: Apache-2.0

// Package xsk opens AF_XDP sockets: a UMEM of frames, the rings through which
// frames travel between the kernel and this process, and the wakeups that
// make them move. It loads no program and touches no XSKMAP: the caller puts
// [Socket.FD] into the map after opening and takes it out before closing.
//
// # Who owns a frame
//
// A frame has one owner at a time. The caller of this package owns every frame
// at the start. Handing its address to [Queue.Exchange] for recycling, or putting
// it into QueueConfig.Initial, gives it to the kernel; [Socket.Receive] gives it
// back. [Socket.Send] gives it to the kernel as well, and Exchange gives it back
// among the completed addresses. Which socket of a queue sent a frame does not
// matter: Exchange returns the completions of all of them. Binaries built with the
// race detector check every one of these steps and panic at the first frame given
// away twice.
//
// # Who may call what
//
// The receive side of a Socket (Receive, RxAvailable) belongs to one goroutine,
// the send side (Send, Kick, TxFree, TxOutstanding) to one goroutine, which may
// be another one. [Queue.Exchange] may be called by any goroutine at any time.
// None of these allocates, but for errors. A goroutine that opens a socket must be
// locked to a thread in the network namespace of the interface; using and closing
// it may happen anywhere.
//
// # Closing
//
// Take the sockets out of the XSKMAP, stop the goroutines that use them, close
// the sockets, and then the UMEM. Slices of the UMEM are unmapped memory after
// that.
//
// Linux 5.10 or newer is required, for several queues on one UMEM. Frames that
// span several descriptors need Linux 6.6; see [Granted].
package xsk
