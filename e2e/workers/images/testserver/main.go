// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

// Command testserver is what the pods of the tests run: a web server that is also
// a validating webhook and an aggregated API, a writer of log lines, and a client
// of the cluster that it runs in.
//
//	testserver serve [-listen :8080] [-tls-listen :8443 -tls-dir /tls]
//	testserver spam [-lines N] [-size BYTES] [-every DURATION]
//	testserver pods [-certificate-dir DIR]
package main

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"log"
	"net/http"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	admissionv1 "k8s.io/api/admission/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	corev1 "k8s.io/client-go/kubernetes/typed/core/v1"
	"k8s.io/client-go/rest"
)

func main() {
	log.SetFlags(0)
	// The first process of a PID namespace gets no signal that it does not ask for.
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	commands := map[string]func(context.Context, []string) error{"serve": serve, "spam": spam, "pods": pods}
	if len(os.Args) < 2 || commands[os.Args[1]] == nil {
		log.Fatal("usage: testserver serve|spam|pods [flags]")
	}
	if err := commands[os.Args[1]](ctx, os.Args[2:]); err != nil && !errors.Is(err, context.Canceled) {
		log.Fatal(err)
	}
}

// serve serves until ctx is done.
func serve(ctx context.Context, args []string) error {
	flags := flag.NewFlagSet("serve", flag.ExitOnError)
	listen := flags.String("listen", ":8080", "where to serve HTTP")
	tlsListen := flags.String("tls-listen", "", "where to serve HTTPS too")
	tlsDir := flags.String("tls-dir", "/tls", "directory with tls.crt and tls.key")
	if err := flags.Parse(args); err != nil {
		return err
	}
	hostname, err := os.Hostname()
	if err != nil {
		return err
	}

	mux := http.NewServeMux()
	mux.HandleFunc("GET /hostname", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, hostname) })
	mux.HandleFunc("GET /address", func(w http.ResponseWriter, r *http.Request) { fmt.Fprint(w, r.RemoteAddr) })
	mux.HandleFunc("POST /echo", func(w http.ResponseWriter, r *http.Request) { pass(w, r.Body) })
	mux.HandleFunc("GET /fetch", fetch)
	mux.HandleFunc("POST /admit", admit(hostname))
	mux.HandleFunc("GET /apis/e2e.test/v1", discovery)
	mux.HandleFunc("GET /apis/e2e.test/v1/greetings", greetings(hostname))
	mux.HandleFunc("GET /apis/e2e.test/v1/greetings/{name}", greetings(hostname))

	failed := make(chan error, 2)
	servers := []*http.Server{{Addr: *listen, Handler: mux}}
	go func() { failed <- servers[0].ListenAndServe() }()
	if *tlsListen != "" {
		secure := &http.Server{Addr: *tlsListen, Handler: mux, TLSConfig: &tls.Config{MinVersion: tls.VersionTLS12}}
		servers = append(servers, secure)
		go func() {
			failed <- secure.ListenAndServeTLS(filepath.Join(*tlsDir, "tls.crt"), filepath.Join(*tlsDir, "tls.key"))
		}()
	}
	log.Printf("serving as %s", hostname)
	select {
	case <-ctx.Done():
	case err = <-failed:
	}
	for _, server := range servers {
		server.Close()
	}
	return err
}

// fetch gets the URL that the query names, as a pod sees it.
func fetch(w http.ResponseWriter, r *http.Request) {
	client := http.Client{Timeout: 5 * time.Second, Transport: &http.Transport{DisableKeepAlives: true}}
	resp, err := client.Get(r.URL.Query().Get("url"))
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadGateway)
		return
	}
	defer resp.Body.Close()
	w.WriteHeader(resp.StatusCode)
	pass(w, resp.Body)
}

// pass passes a body on. Whoever does not get all of it sees so, by its length.
func pass(w io.Writer, r io.Reader) {
	if _, err := io.Copy(w, r); err != nil {
		log.Print(err)
	}
}

// admit refuses objects that are labelled so, and says which pod did.
func admit(hostname string) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		var review admissionv1.AdmissionReview
		if err := json.NewDecoder(r.Body).Decode(&review); err != nil || review.Request == nil {
			http.Error(w, "not an AdmissionReview", http.StatusBadRequest)
			return
		}
		var object metav1.PartialObjectMetadata
		if err := json.Unmarshal(review.Request.Object.Raw, &object); err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		review.Response = &admissionv1.AdmissionResponse{UID: review.Request.UID, Allowed: object.Labels["e2e.test/refuse"] == ""}
		if !review.Response.Allowed {
			review.Response.Result = &metav1.Status{Message: "refused by pod " + hostname}
		}
		review.Request = nil
		respond(w, review)
	}
}

func discovery(w http.ResponseWriter, _ *http.Request) {
	respond(w, metav1.APIResourceList{
		TypeMeta:     metav1.TypeMeta{Kind: "APIResourceList", APIVersion: "v1"},
		GroupVersion: "e2e.test/v1",
		APIResources: []metav1.APIResource{{Name: "greetings", SingularName: "greeting", Kind: "Greeting", Verbs: metav1.Verbs{"get", "list"}}},
	})
}

// greetings greets the user that the API server says it acts for.
func greetings(hostname string) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		greeting := map[string]any{
			"apiVersion": "e2e.test/v1",
			"kind":       "Greeting",
			"metadata":   map[string]any{"name": "hello", "creationTimestamp": nil},
			"user":       r.Header.Get("X-Remote-User"),
			"pod":        hostname,
		}
		switch r.PathValue("name") {
		case "":
			respond(w, map[string]any{"apiVersion": "e2e.test/v1", "kind": "GreetingList", "metadata": map[string]any{}, "items": []any{greeting}})
		case "hello":
			respond(w, greeting)
		default:
			http.NotFound(w, r)
		}
	}
}

func respond(w http.ResponseWriter, value any) {
	w.Header().Set("Content-Type", "application/json")
	if err := json.NewEncoder(w).Encode(value); err != nil {
		log.Print(err)
	}
}

// spam writes numbered lines, so that a reader sees whether one is missing.
func spam(ctx context.Context, args []string) error {
	flags := flag.NewFlagSet("spam", flag.ExitOnError)
	lines := flags.Int("lines", 0, "how many lines to write; 0 is no end")
	size := flags.Int("size", 0, "how long a line is at least")
	every := flags.Duration("every", 0, "how long to wait between two lines")
	if err := flags.Parse(args); err != nil {
		return err
	}
	for i := 1; *lines == 0 || i <= *lines; i++ {
		line := fmt.Sprint("line ", i)
		fmt.Println(line + strings.Repeat(" ", max(0, *size-len(line)-2)) + ".")
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(*every):
		}
	}
	<-ctx.Done()
	return ctx.Err()
}

// pods lists the pods of its own namespace, as any in-cluster client does: with its
// service account, or with a client certificate instead.
func pods(ctx context.Context, args []string) error {
	flags := flag.NewFlagSet("pods", flag.ExitOnError)
	dir := flags.String("certificate-dir", "", "directory with tls.crt and tls.key to use instead of the service account's token")
	host := flags.String("host", "", "the API server's URL instead of the one that the environment names")
	if err := flags.Parse(args); err != nil {
		return err
	}
	config, err := rest.InClusterConfig()
	if err != nil {
		return err
	}
	if *dir != "" {
		config = rest.AnonymousClientConfig(config)
		config.CertFile, config.KeyFile = filepath.Join(*dir, "tls.crt"), filepath.Join(*dir, "tls.key")
	}
	if *host != "" {
		config.Host = *host
	}
	config.Timeout = 10 * time.Second
	client, err := corev1.NewForConfig(config)
	if err != nil {
		return err
	}
	namespace, err := os.ReadFile("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
	if err != nil {
		return err
	}
	list, err := client.Pods(string(namespace)).List(ctx, metav1.ListOptions{})
	if err != nil {
		return fmt.Errorf("list pods through %s: %w", config.Host, err)
	}
	for _, pod := range list.Items {
		fmt.Println(pod.Name)
	}
	return nil
}
