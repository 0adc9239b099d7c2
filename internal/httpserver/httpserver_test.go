// SPDX-License-Identifier: Apache-2.0

package httpserver

import (
	"bufio"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"testing"
	"time"
)

// serve returns the address of a server whose requests for /slow tell that they are there, and wait
// until release is closed.
func serve(t *testing.T) (address string, slow, release chan struct{}) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	slow, release = make(chan struct{}), make(chan struct{})
	s, bounded := New(l, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/slow" {
			slow <- struct{}{}
			<-release
		}
		fmt.Fprint(w, "answer")
	}), 10*time.Second, slog.New(slog.DiscardHandler))
	go func() { _ = s.Serve(bounded) }()
	t.Cleanup(func() { s.Close() })
	return l.Addr().String(), slow, release
}

func dial(t *testing.T, address string) net.Conn {
	t.Helper()
	c, err := net.Dial("tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

func get(t *testing.T, c net.Conn, path string) error {
	t.Helper()
	if _, err := fmt.Fprintf(c, "GET %s HTTP/1.1\r\nHost: x\r\n\r\n", path); err != nil {
		return err
	}
	_ = c.SetReadDeadline(time.Now().Add(10 * time.Second))
	r, err := http.ReadResponse(bufio.NewReader(c), nil)
	if err != nil {
		return err
	}
	defer r.Body.Close()
	b, err := io.ReadAll(r.Body)
	if err == nil && string(b) != "answer" {
		err = fmt.Errorf("%q", b)
	}
	return err
}

// Any number of connections that ask nothing keep nobody out, and the server has a few of
// them open.
func TestIdleConnectionsMakeRoom(t *testing.T) {
	address, _, _ := serve(t)
	var idle []net.Conn
	for range 1000 {
		idle = append(idle, dial(t, address))
	}
	if err := get(t, dial(t, address), "/"); err != nil {
		t.Fatal(err)
	}
	_ = idle[0].SetReadDeadline(time.Now().Add(10 * time.Second))
	if n, err := idle[0].Read(make([]byte, 1)); n > 0 || err == nil {
		t.Errorf("the oldest is still open: %d bytes", n)
	} else if nerr, ok := err.(net.Error); ok && nerr.Timeout() {
		t.Error("the oldest is still open")
	}
	// The youngest has its place, and may ask.
	if err := get(t, idle[len(idle)-1], "/"); err != nil {
		t.Errorf("the youngest: %v", err)
	}
}

// Requests under way keep their connections. Others are closed meanwhile, and are answered
// afterwards.
func TestRequestsUnderWayKeepTheirConnections(t *testing.T) {
	address, slow, release := serve(t)
	answers := make(chan error, MaxConns)
	for range MaxConns {
		c := dial(t, address)
		go func() { answers <- get(t, c, "/slow") }()
	}
	for range MaxConns {
		<-slow
	}
	for range 3 {
		c := dial(t, address)
		_ = c.SetReadDeadline(time.Now().Add(10 * time.Second))
		_, err := c.Read(make([]byte, 1))
		if nerr, ok := err.(net.Error); err == nil || ok && nerr.Timeout() {
			t.Error("one more is let in")
		}
	}
	close(release)
	for range MaxConns {
		if err := <-answers; err != nil {
			t.Error(err)
		}
	}
	if err := get(t, dial(t, address), "/"); err != nil {
		t.Error(err)
	}
}

func TestLocal(t *testing.T) {
	for host, want := range map[string]bool{
		"localhost": true, "LOCALHOST:80": true, "127.0.0.1": true, "127.3.4.5:9465": true, "[::1]:80": true, "::1": true, "[::ffff:127.0.0.1]": true,
		"": false, "example.com": false, "10.0.0.1:80": false, "localhost.example.com": false, "127.0.0.1.example.com": false,
	} {
		if Local(host) != want {
			t.Errorf("%q: %v", host, !want)
		}
	}
}
