// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/xspin/xspin/control"
	"github.com/xspin/xspin/internal/peer"
)

// maxPath is what fits into a sockaddr_un, with the 0 behind it.
const maxPath = 107

// A listener accepts connections, knows who is at their other end, and lets no user
// have so many of them that others find none.
type listener struct {
	*net.UnixListener
	path string
	log  *slog.Logger

	done    chan struct{}
	once    sync.Once
	refused chan *net.UnixConn // to be closed, which may take its time: see refuseRights

	mu    sync.Mutex
	users map[int]int // connections by uid; root is not counted
	all   int
}

// A conn is a connection whose peer is known.
type conn struct {
	*net.UnixConn
	peer control.Peer
	l    *listener
	once sync.Once

	answering atomic.Bool // a handler of ours has a request
}

// listen makes the socket. One that a killed daemon has left is replaced, one that
// somebody answers on is not, nor is anything else of that name. All may connect:
// what they may do is decided by who they are.
func listen(path string, log *slog.Logger) (_ *listener, err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("control socket %s: %w", path, err)
		}
	}()
	if len(path) > maxPath {
		return nil, fmt.Errorf("the path has %d bytes: Linux allows %d", len(path), maxPath)
	}
	dir := filepath.Dir(path)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, err
	}
	// Two daemons that start at the same time must not both find a stale socket: the
	// second would remove that of the first.
	unlock, err := lock(path + ".lock")
	if err != nil {
		return nil, err
	}
	defer unlock()
	if err := removeStale(path); err != nil {
		return nil, err
	}
	u, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		return nil, err
	}
	if err := refuseRights(u); err != nil {
		return nil, errors.Join(err, u.Close())
	}
	if err := os.Chmod(path, 0o666); err != nil {
		return nil, errors.Join(err, u.Close())
	}
	l := &listener{
		UnixListener: u, path: path, log: log, done: make(chan struct{}),
		refused: make(chan *net.UnixConn, 64), users: map[int]int{},
	}
	go l.closeRefused()
	return l, nil
}

// lockTime is how long somebody else may take to start a daemon.
const lockTime = 5 * time.Second

// lock locks a file of its own, which is not there afterwards. (Anybody who can open a
// directory could lock that, for as long as they like.)
func lock(path string) (unlock func(), err error) {
	deadline := time.Now().Add(lockTime)
	for ; ; time.Sleep(10 * time.Millisecond) {
		f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR|syscall.O_NOFOLLOW, 0o600)
		if err != nil {
			return nil, err
		}
		err = syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
		if err == nil {
			// It may be one that its owner has just removed.
			mine, err := f.Stat()
			if there, err2 := os.Lstat(path); err == nil && err2 == nil && os.SameFile(mine, there) {
				return func() { os.Remove(path); f.Close() }, nil
			}
		}
		f.Close()
		if time.Now().After(deadline) {
			return nil, fmt.Errorf("lock %s: %w: another daemon is starting, or has hung; remove the file if not", path, cmp.Or(err, error(syscall.EWOULDBLOCK)))
		}
	}
}

// passRights is SO_PASSRIGHTS of asm-generic/socket.h, which accepted connections inherit.
const passRights = 83

// refuseRights has the kernel refuse descriptors that peers send along: closing one can
// take as long as its owner likes (a TCP socket that lingers), and whoever reads, or closes
// the connection, closes it. Linux 6.16 and later.
func refuseRights(u *net.UnixListener) error {
	raw, err := u.SyscallConn()
	if err != nil {
		return err
	}
	var errno error
	if err := raw.Control(func(fd uintptr) { errno = syscall.SetsockoptInt(int(fd), syscall.SOL_SOCKET, passRights, 0) }); err != nil {
		return err
	}
	if errno != nil && !errors.Is(errno, syscall.ENOPROTOOPT) {
		return fmt.Errorf("refuse descriptors (SO_PASSRIGHTS): %w", errno)
	}
	return nil
}

func removeStale(path string) error {
	i, err := os.Lstat(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case err != nil:
		return err
	case i.Mode().Type() != fs.ModeSocket:
		return fmt.Errorf("the path exists and is not a socket (%v): remove it, or name another path", i.Mode())
	}
	c, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: path, Net: "unix"})
	if err == nil {
		defer c.Close()
		who := "a process"
		if p, err := peer.Of(c); err == nil {
			who = fmt.Sprintf("process %d", p.PID)
		}
		return fmt.Errorf("%w: %s answers there already; stop it, or name another path", syscall.EADDRINUSE, who)
	}
	if !errors.Is(err, syscall.ECONNREFUSED) {
		return fmt.Errorf("%w: cannot tell whether a daemon answers there: %w", syscall.EADDRINUSE, err)
	}
	return os.Remove(path)
}

// Accept returns the next connection. When the process has no descriptors left it
// waits for some: peers wait in the socket's queue, and those that are connected are
// served.
func (l *listener) Accept() (net.Conn, error) {
	wait := time.Duration(0)
	for {
		u, err := l.AcceptUnix()
		switch {
		case errors.Is(err, syscall.EMFILE), errors.Is(err, syscall.ENFILE), errors.Is(err, syscall.ENOBUFS), errors.Is(err, syscall.ENOMEM):
			if wait == 0 {
				l.log.Warn("no more connections can be accepted for now", "socket", l.path, "error", err)
			}
			wait = min(max(2*wait, 5*time.Millisecond), time.Second)
			select {
			case <-time.After(wait):
				continue
			case <-l.done:
				return nil, net.ErrClosed
			}
		case errors.Is(err, syscall.ECONNABORTED):
			continue
		case err != nil:
			return nil, err
		}
		if wait != 0 {
			l.log.Info("connections are accepted again", "socket", l.path)
			wait = 0
		}
		p, err := peer.Of(u)
		if err != nil { // it has gone
			u.Close()
			continue
		}
		c := &conn{UnixConn: u, l: l, peer: control.Peer{
			PID: p.PID, UID: p.UID, GID: p.GID, Groups: p.Groups, Since: time.Now(),
		}}
		if err := l.take(p.UID); err != nil {
			refuse(u, err)
			select {
			case l.refused <- u:
			case <-l.done:
				return nil, net.ErrClosed
			}
			continue
		}
		return c, nil
	}
}

// take counts a connection.
func (l *listener) take(uid int) error {
	if uid == 0 {
		return nil
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case l.users[uid] >= maxPerUser:
		return fmt.Errorf("user %d has %d connections to the daemon, the maximum: close some", uid, l.users[uid])
	case l.all >= maxUsers:
		return fmt.Errorf("users have %d connections to the daemon, the maximum", l.all)
	}
	l.users[uid]++
	l.all++
	return nil
}

func (l *listener) give(uid int) {
	if uid == 0 {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.all--
	if l.users[uid]--; l.users[uid] == 0 {
		delete(l.users, uid)
	}
}

// refuse answers whatever the peer may ask. It does not wait: the buffer of a new
// connection has room for it. The deadline is for a kernel where that is not so.
func refuse(u *net.UnixConn, why error) {
	text := fmt.Sprintf("{\"error\": %q}\n", why)
	_ = u.SetDeadline(time.Now().Add(time.Second))
	_, _ = fmt.Fprintf(u, "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%s", len(text), text)
}

// closeRefused closes connections until the listener is closed.
func (l *listener) closeRefused() {
	for {
		select {
		case u := <-l.refused:
			u.Close()
		case <-l.done:
			return
		}
	}
}

// Close removes the socket. Idempotent.
func (l *listener) Close() (err error) {
	l.once.Do(func() {
		close(l.done)
		err = l.UnixListener.Close()
	})
	return err
}

// Close closes the connection, and only then makes room for another one of its user's.
// Idempotent.
func (c *conn) Close() (err error) {
	c.once.Do(func() {
		err = c.UnixConn.Close()
		c.l.give(c.peer.UID)
	})
	return err
}

// notUnderstood is in what net/http answers by itself, in one piece, to a request that is
// not HTTP as it should be.
var notUnderstood = []byte("\r\nContent-Type: text/plain; charset=utf-8\r\nConnection: close\r\n\r\n")

// Write has such answers have a document, as all others have. They cannot be had from
// net/http in any other way.
func (c *conn) Write(b []byte) (int, error) {
	if c.answering.Load() || !bytes.HasPrefix(b, []byte("HTTP/1.1 ")) {
		return c.UnixConn.Write(b)
	}
	head, text, plain := bytes.Cut(b, notUnderstood)
	if !plain {
		return c.UnixConn.Write(b)
	}
	doc, err := json.Marshal(map[string]string{"error": string(text)})
	if err != nil {
		return 0, err
	}
	if _, err := fmt.Fprintf(c.UnixConn, "%s\r\nContent-Type: application/json\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%s\n", head, len(doc)+1, doc); err != nil {
		return 0, err
	}
	return len(b), nil
}

func (c *conn) String() string {
	return fmt.Sprintf("process %d of user %d", c.peer.PID, c.peer.UID)
}
