// SPDX-License-Identifier: Apache-2.0

package slmp_test

import (
	"context"
	"fmt"
	"net"
	"strings"

	"github.com/xspin/xspin/slmp"
)

func Example() {
	addr, stop := startReceiver()
	defer stop()

	c, err := slmp.Dial(context.Background(), addr, slmp.Config{})
	if err != nil {
		panic(err)
	}
	defer c.Close()
	// Files, and anything else that can be read. Any number of goroutines may
	// send at the same time.
	r, err := c.Send(context.Background(), strings.NewReader("hello, NIC"), slmp.Options{})
	if err != nil {
		panic(err)
	}
	fmt.Println(r.Bytes, "bytes acknowledged in", r.Segments, "segment")
	// Output: 10 bytes acknowledged in 1 segment
}

// Many small messages, 256 of them on their way at a time, and no goroutine for
// any of them.
func ExampleConn_Post() {
	addr, stop := startReceiver()
	defer stop()
	c, err := slmp.Dial(context.Background(), addr, slmp.Config{})
	if err != nil {
		panic(err)
	}
	defer c.Close()

	const messages = 10_000
	msg := make([]byte, 64)
	room := make(chan struct{}, 256)
	var failed error
	for range messages {
		room <- struct{}{}
		if err := c.Post(msg, func(err error) {
			if err != nil {
				failed = err
			}
			<-room
		}); err != nil {
			panic(err)
		}
	}
	for range cap(room) {
		room <- struct{}{} // all are back
	}
	fmt.Println(c.Stats().Completed, "messages delivered, error:", failed)
	// Output: 10000 messages delivered, error: <nil>
}

// startReceiver acknowledges whatever comes, on loopback. A NIC does so when its
// handlers have run: see package nic.
func startReceiver() (addr string, stop func()) {
	sock, err := net.ListenUDP("udp", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		panic(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		b := make([]byte, 1<<16)
		for {
			n, from, err := sock.ReadFromUDPAddrPort(b)
			if err != nil {
				return // closed
			}
			if h, err := slmp.ParseHeader(b[:n]); err == nil && h.Flags&slmp.SYN != 0 {
				a := slmp.Ack{ID: h.ID, Offset: h.Offset}
				_, _ = sock.WriteToUDPAddrPort(a.Append(nil), from)
			}
		}
	}()
	return sock.LocalAddr().String(), func() {
		sock.Close()
		<-done
	}
}
