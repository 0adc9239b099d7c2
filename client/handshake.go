// SPDX-License-Identifier: Apache-2.0

package client

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"syscall"

	"github.com/xspin/xspin/control"
)

const (
	maxDescriptors = 253     // of one message: SCM_MAX_FD
	maxHead        = 1 << 20 // bytes until the first document has ended
)

// handshake asks for a session and returns the first document of it. The descriptors
// are the caller's, also if it fails.
//
// A plain read loses the descriptors, and one read may return
// the end of the HTTP response together with what follows: so there is no HTTP client
// that could do this.
func handshake(conn *net.UnixConn, name string, observer bool) (_ *control.AttachReply, fds []int, err error) {
	path := "/v1/contexts/" + url.PathEscape(name) + "/attach"
	if observer {
		path += "?observer=1"
	}
	if _, err := fmt.Fprintf(conn, "POST %s HTTP/1.1\r\nHost: xspin\r\nConnection: Upgrade\r\nUpgrade: %s\r\nContent-Length: 0\r\n\r\n", path, control.SessionProtocol); err != nil && !errors.Is(err, syscall.EPIPE) {
		return nil, nil, gone(err) // EPIPE: it may have said why
	}
	in := &receiver{conn: conn}
	if err := in.until("\r\n\r\n"); err != nil {
		return nil, in.fds, err
	}
	w, err := http.ReadResponse(bufio.NewReader(io.MultiReader(bytes.NewReader(in.b), conn)), nil)
	if err != nil {
		return nil, in.fds, fmt.Errorf("what answers is not the daemon: %w", err)
	}
	defer w.Body.Close()
	if w.StatusCode != http.StatusSwitchingProtocols {
		return nil, in.fds, control.ReadError(w)
	}
	_, in.b, _ = bytes.Cut(in.b, []byte("\r\n\r\n"))
	if err := in.until("\n"); err != nil {
		return nil, in.fds, err
	}
	doc, more, _ := bytes.Cut(in.b, []byte("\n"))
	reply := new(control.AttachReply)
	if err := json.Unmarshal(doc, reply); err != nil {
		return nil, in.fds, fmt.Errorf("first document of the session: %w", err)
	}
	if reply.Error != "" {
		return nil, in.fds, errors.New(reply.Error)
	}
	if len(more) > 0 { // nothing was asked: it can only be a good-bye
		var answer control.Answer
		_ = json.Unmarshal(more, &answer)
		return nil, in.fds, &EndedError{name, answer.Bye}
	}
	return reply, in.fds, nil
}

// A receiver reads bytes, and descriptors that come with them.
type receiver struct {
	conn *net.UnixConn
	b    []byte
	fds  []int
}

// until reads until something is there.
func (r *receiver) until(end string) error {
	buf := make([]byte, 4096)
	oob := make([]byte, syscall.CmsgSpace(4*maxDescriptors))
	for !bytes.Contains(r.b, []byte(end)) {
		if len(r.b) > maxHead {
			return fmt.Errorf("the daemon's answer has more than %d bytes", maxHead)
		}
		n, noob, flags, _, err := r.conn.ReadMsgUnix(buf, oob) // close-on-exec
		if e := r.take(oob[:noob]); e != nil {
			return e
		}
		if flags&syscall.MSG_CTRUNC != 0 {
			return errors.New("not all descriptors came: raise the limit on open files (ulimit -n)")
		}
		if err != nil || n == 0 {
			return gone(err)
		}
		r.b = append(r.b, buf[:n]...)
	}
	return nil
}

// take keeps the descriptors of a control message.
func (r *receiver) take(oob []byte) error {
	if len(oob) == 0 {
		return nil
	}
	messages, err := syscall.ParseSocketControlMessage(oob)
	if err != nil {
		return fmt.Errorf("descriptors: %w", err)
	}
	for _, m := range messages {
		fds, err := syscall.ParseUnixRights(&m)
		if err != nil {
			return fmt.Errorf("descriptors: %w", err)
		}
		r.fds = append(r.fds, fds...)
	}
	return nil
}

func gone(err error) error {
	if err == nil || errors.Is(err, io.EOF) || errors.Is(err, syscall.ECONNRESET) || errors.Is(err, syscall.EPIPE) {
		return errors.New("the daemon went away before it answered")
	}
	return err
}

func closeAll(fds []int) {
	for _, fd := range fds {
		syscall.Close(fd)
	}
}
