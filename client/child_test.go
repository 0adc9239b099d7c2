// SPDX-License-Identifier: Apache-2.0

package client_test

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net"
	"os"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/xspin/xspin/client"
	"github.com/xspin/xspin/control"
	"github.com/xspin/xspin/daemon"
	"github.com/xspin/xspin/hostq"
)

// The test binary is also each of the processes that the tests need: roles by name. A
// role says on stdout, in lines, what happens to it, and ends with its stdin.
const roleEnv = "XSPIN_CLIENT_TEST"

var roles = map[string]func(args []string) error{
	"daemon":   runDaemon,
	"app":      runApp,
	"step":     runStep,
	"scribble": runScribble,
	"shell":    runShell,
}

func TestMain(m *testing.M) {
	if words := strings.Fields(os.Getenv(roleEnv)); len(words) > 0 {
		if err := roles[words[0]](words[1:]); err != nil {
			fmt.Println("error:", err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

func untilStdinEnds() { io.Copy(io.Discard, os.Stdin) }

func exitWithStdin() {
	untilStdinEnds()
	os.Exit(0)
}

// runDaemon is a daemon whose configuration is the file. It tells what it uses when it
// gets a line.
func runDaemon(args []string) error {
	cfg, err := daemon.Load(args[0])
	if err != nil {
		return err
	}
	d, err := daemon.Start(cfg, daemon.Options{File: args[0], Logger: slog.New(slog.NewTextHandler(os.Stderr, nil))})
	if err != nil {
		return err
	}
	fmt.Println("ready")
	for in := bufio.NewScanner(os.Stdin); in.Scan(); {
		fmt.Println(used())
	}
	return d.Close(context.Background())
}

// slots is in how many parts an application cuts its window.
const slots = 8

// runApp is an application: socket, context, and whether it attaches again and again.
// It tells length and sum of each message, and answers requests in upper case.
func runApp(args []string) error {
	go exitWithStdin()
	ctx := context.Background()
	again := len(args) > 2
	for {
		app, err := client.Attach(ctx, args[1], client.Options{Socket: args[0]})
		if err != nil {
			fmt.Println("no:", err)
			if !again {
				return err
			}
			time.Sleep(50 * time.Millisecond)
			continue
		}
		err = serve(ctx, app)
		fmt.Println("ended:", err)
		if err := app.Close(); err != nil {
			return err
		}
		if !again {
			return nil
		}
	}
}

func serve(ctx context.Context, app *client.App) error {
	w := app.Windows()[0]
	slot := w.Size() / slots
	post := func(i uint64) error {
		return app.Post(ctx, control.Receive{Window: w.Name(), Place: int64(i) * slot, Size: slot, Ignore: ^uint32(0), User: i})
	}
	for i := range uint64(slots) {
		if err := post(i); err != nil && !strings.Contains(err.Error(), "never end") {
			return err
		}
	}
	fresh := bytes.Count(w.Bytes(), []byte{0}) == len(w.Bytes())
	fmt.Println("attached, memory is zero:", fresh)
	for {
		var e hostq.Event
		for app.Event(&e) {
			if e.Kind != hostq.MessageEnded {
				fmt.Printf("event %+v\n", e)
				continue
			}
			fmt.Printf("message %d %x\n", e.Length, sha256.Sum256(w.Bytes()[int64(e.User)*slot:][:e.Length]))
			if err := post(e.User); err != nil {
				return err
			}
		}
		var r hostq.Call
		for app.Request(&r) {
			if err := app.Respond(&r, 0, bytes.ToUpper(r.Payload)); err != nil {
				return err
			}
		}
		if err := app.Wait(ctx); err != nil {
			return err
		}
	}
}

// runShell is an application that does what it is told in lines, and tells what came of
// it, each with its first word: socket.
func runShell(args []string) error {
	ctx := context.Background()
	var app *client.App
	for in := bufio.NewScanner(os.Stdin); in.Scan(); {
		words := strings.Fields(in.Text())
		n := func(i int) uint64 {
			v, _ := strconv.ParseUint(words[i], 10, 64)
			return v
		}
		receive := func() control.Receive {
			return control.Receive{Place: int64(n(1)), Size: int64(n(2)), Ignore: ^uint32(0), User: n(3)}
		}
		var result any
		var err error
		switch words[0] {
		case "attach":
			var a *client.App
			if a, err = client.Attach(ctx, words[1], client.Options{Socket: args[0]}); err == nil {
				app = a
			}
		case "context":
			result = app.Context()
		case "err":
			result = app.Err()
		case "ended":
			<-app.Ended()
		case "post":
			err = app.Post(ctx, receive())
		case "unpost":
			err = app.Unpost(ctx, receive())
		case "activate":
			err = app.Activate(ctx)
		case "deactivate":
			err = app.Deactivate(ctx)
		case "state":
			var info *control.ContextInfo
			if info, err = app.Info(ctx); err == nil {
				result = info.State
			}
		case "fill": // offset and text
			result = copy(app.Windows()[0].Bytes()[n(1):], words[2])
		case "bytes": // offset and length
			result = hex.EncodeToString(app.Windows()[0].Bytes()[n(1):][:n(2)])
		case "trigger": // word, offset, length, slice
			err = app.Trigger(ctx, control.Trigger{
				Words: [4]uint64{n(1)}, Window: app.Windows()[0].Name(), Offset: int64(n(2)), Length: int64(n(3)), Slice: int(n(4)),
			})
		case "event":
			var e hostq.Event
			for !app.Event(&e) && err == nil {
				err = app.Wait(ctx)
			}
			result = fmt.Sprintf("%d cause %d length %d user %d", e.Kind, e.Cause, e.Length, e.User)
		case "counter": // and value
			err = app.WaitCounter(ctx, int(n(1)), n(2))
		case "close":
			err = app.Close()
		}
		if err != nil {
			result = fmt.Sprint("error: ", err)
		}
		fmt.Println(words[0], result)
	}
	return nil
}

// runStep goes as far as a step of an attachment's life, says so, and waits to be
// killed: socket, context, step.
func runStep(args []string) error {
	go exitWithStdin()
	at := func(step string) {
		if step == args[2] {
			fmt.Println("here")
			select {}
		}
	}
	if args[2] == "traffic" {
		return runApp(args[:2])
	}
	c, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: args[0], Net: "unix"})
	if err != nil {
		return err
	}
	at("connect")
	upgrade := fmt.Sprintf("POST /v1/contexts/%s/attach HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: %s\r\n\r\n", args[1], control.SessionProtocol)
	io.WriteString(c, upgrade[:len(upgrade)/2])
	at("half-of-the-request")
	io.WriteString(c, upgrade[len(upgrade)/2:])
	at("request")
	if _, err := readHead(c); err != nil {
		return err
	}
	at("101")
	reply, fds, err := readReply(c)
	if err != nil {
		return err
	}
	at("descriptors")
	for i, w := range reply.Windows {
		if _, err := unix.Mmap(fds[i], 0, int(w.Size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED); err != nil {
			return err
		}
	}
	at("mapped")
	io.WriteString(c, `{"seq": 1, "do": "sta`)
	at("half-of-an-ask")
	io.WriteString(c, "ts\"}\n")
	at("ask")
	c.CloseWrite()
	at("detach")
	return errors.New("there is no such step")
}

// readHead reads the response that begins a session, and not a byte more.
func readHead(c *net.UnixConn) (string, error) {
	var b []byte
	for !bytes.HasSuffix(b, []byte("\r\n\r\n")) {
		var one [1]byte
		if _, err := c.Read(one[:]); err != nil {
			return "", err
		}
		b = append(b, one[0])
	}
	if !bytes.HasPrefix(b, []byte("HTTP/1.1 101 ")) {
		return "", fmt.Errorf("%s", b)
	}
	return string(b), nil
}

// readReply reads the first document, and the descriptors.
func readReply(c *net.UnixConn) (reply control.AttachReply, fds []int, err error) {
	b, oob := make([]byte, 1<<16), make([]byte, 4096)
	n, noob, _, _, err := c.ReadMsgUnix(b, oob)
	if err != nil {
		return reply, nil, err
	}
	messages, err := syscall.ParseSocketControlMessage(oob[:noob])
	if err != nil {
		return reply, nil, err
	}
	for _, m := range messages {
		f, err := syscall.ParseUnixRights(&m)
		if err != nil {
			return reply, nil, err
		}
		fds = append(fds, f...)
	}
	return reply, fds, json.Unmarshal(b[:n], &reply)
}

// runScribble attaches again and again, and each time writes random bytes into every
// page that it can map, and into every descriptor it got: socket, context.
func runScribble(args []string) error {
	over := make(chan struct{})
	go func() { untilStdinEnds(); close(over) }()
	rnd := rand.NewChaCha8([32]byte{1})
	attached, pages := 0, 0
	for round := 0; ; round++ {
		select {
		case <-over:
			fmt.Println("scribbled", attached, pages)
			return nil
		default:
		}
		n, err := scribble(args[0], args[1], rnd, time.Duration(100+round%5*100)*time.Millisecond)
		if err != nil {
			fmt.Println("no:", err)
			time.Sleep(10 * time.Millisecond)
			continue
		}
		attached++
		pages += n
		fmt.Println("round", round)
	}
}

func scribble(socket, context string, rnd *rand.ChaCha8, d time.Duration) (pages int, err error) {
	c, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: socket, Net: "unix"})
	if err != nil {
		return 0, err
	}
	defer c.Close()
	fmt.Fprintf(c, "POST /v1/contexts/%s/attach HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: %s\r\n\r\n", context, control.SessionProtocol)
	if _, err := readHead(c); err != nil {
		return 0, err
	}
	_, fds, err := readReply(c)
	if err != nil {
		return 0, err
	}
	var maps [][]byte
	defer func() {
		for _, b := range maps {
			unix.Munmap(b)
		}
		for _, fd := range fds {
			unix.Close(fd)
		}
	}()
	for _, fd := range fds {
		dup, err := unix.Dup(fd)
		if err != nil {
			return 0, err
		}
		m, err := ebpf.NewMapFromFD(dup) // takes it
		if err != nil {
			_ = unix.SetNonblock(fd, rnd.Uint64()&1 == 0) // a doorbell: ours may block now
			continue
		}
		size := int(m.MaxEntries()) * int(m.ValueSize())
		m.Close()
		b, err := unix.Mmap(fd, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
		if err != nil {
			return 0, fmt.Errorf("mapping %d bytes: %w", size, err)
		}
		maps = append(maps, b)
	}
	if len(maps) < 2 {
		return 0, fmt.Errorf("%d maps of %d descriptors", len(maps), len(fds))
	}
	junk := make([]byte, 4096)
	// It does not wait itself, for a daemon that has no more patience with somebody who reads no answers, or for
	// room in a doorbell that nobody empties.
	until := time.Now().Add(d)
	_ = c.SetWriteDeadline(until)
	for time.Now().Before(until) {
		for _, b := range maps {
			for at := 0; at < len(b); at += len(junk) {
				page := b[at:][:len(junk)]
				switch rnd.Uint64() % 8 {
				case 0: // all of it
					rnd.Read(junk)
					copy(page, junk)
				default: // some words, large and small numbers
					for range 8 {
						x := rnd.Uint64()
						off := rnd.Uint64() % 4089
						for i := range 8 {
							page[off+uint64(i)] = byte(x >> (8 * i))
						}
						if x&3 == 0 {
							clear(page[off+1 : off+8])
						}
					}
				}
				pages++
			}
		}
		for _, fd := range fds { // the doorbells
			_, _ = unix.Pwritev2(fd, [][]byte{junk[:rnd.Uint64()%8]}, -1, unix.RWF_NOWAIT)
		}
		fmt.Fprintf(c, "{\"seq\": %d, \"do\": \"stats\"}\n", pages)
	}
	return pages, nil
}
